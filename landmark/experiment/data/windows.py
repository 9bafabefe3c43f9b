"""A stream's view with landmarks, the training windows that are cut from it, and what is drawn for each of them.

The view has a landmark at each position p with p mod W = ℓ (ℓ = block_size, W = ℓ+1), and raw token number p − ⌊p/W⌋ at
every other position. A window is T consecutive positions of the view. With ℓ = 3, landmarks L, end of text E, and a
window of T = 9 from position 1 on, so with the phase 1::

    raw stream       a  b  c  d  e  E  f  g  h  i  …
    position         0  1  2  3  4  5  6  7  8  9 10 11 …
    view             a  b  c  L  d  e  E  L  f  g  h  L …
    window: tokens      b  c  L  d  e  E  L  f  g
    window: targets     c  d  -  e  E  -  -  g  h

A landmark is never predicted: the target before a landmark is the token after it. So targets reach at most two
positions past the window. There is no loss (`-`, NO_LOSS) where the input is a landmark or end of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from landmark.experiment.data.random_numbers import CONTROLLED, JUMPS, REPEATS, STARTS, fractions, random_numbers
from landmark.utils.constants import NO_LOSS, SHORTEST_REPEAT
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch, most_blocks

if TYPE_CHECKING:
    from landmark.experiment.data.stream import Stream

_VALIDATION = 2**64 - 1  # in place of a step, for what is drawn
_MOST = 3  # repeated stretches of a window


def raw_position(position: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each position of the view the number of its raw token (at a landmark of the next), and whether it is one."""
    landmarks_before = position // (block_size + 1)
    is_landmark = position - landmarks_before * (block_size + 1) == block_size
    return position - landmarks_before, is_landmark


class TrainingWindows:
    """Windows of a stream that begin at random, as a pure function of (seed, step, index). num_starts: their possible
    starts, 0…N−T−2, where N is the length of the view.
    """

    def __init__(
        self,
        stream: "Stream | np.ndarray",
        *,
        length: int,
        batch_size: int,
        seed: int,
        block_size: int | None,
        landmark: int,
        eot: int,
        repeats: "Repeats | None" = None,
        beginning: Sequence[int] = (),
        cut_as: int | None = None,
    ):
        """stream: or raw ids. length: T. block_size: ℓ (None: no landmarks). repeats: of `batch`. beginning: ids that
        begin a text, in place of a window's first tokens. cut_as: without landmarks, begin where the windows of this
        block size do (None: anywhere). Raises UserError where the stream is too short.
        """
        self._tokens = np.asarray(stream if isinstance(stream, np.ndarray) else stream.tokens)
        self.length, self.batch_size, self.seed, self.block_size = length, batch_size, seed, block_size
        self._landmark, self._eot, self._repeats = landmark, eot, repeats
        self._beginning = np.array(beginning, dtype=np.int64)
        size = len(self._tokens)
        self._cut_as = cut_as
        self.num_starts = size + (size // block_size if block_size else 0) - length - 1
        if self.num_starts < 1:
            raise UserError(
                f"train.length={length} is too long for a split of {size} tokens: lower it or take more text"
            )

    def batch(self, step: int, indices: range | None = None) -> WindowBatch:
        """Windows `indices` (None: all) of the batch of a step; the first step is 0."""
        indices = range(self.batch_size) if indices is None else indices
        return self._cut(self.starts(step)[indices.start : indices.stop : indices.step], (step, indices))

    def starts(self, step: int) -> np.ndarray:
        """Positions of the view where the windows of a step begin, (batch_size,) int64."""
        drawn = random_numbers(self.seed, step, STARTS, range(self.batch_size))
        if self._cut_as is None:
            return (drawn % np.uint64(self.num_starts)).astype(np.int64)
        per_view = self.num_starts + len(self._tokens) // self._cut_as
        starts, _ = raw_position((drawn % np.uint64(per_view)).astype(np.int64), self._cut_as)
        return np.minimum(starts, self.num_starts - 1)

    def at(self, starts: Sequence[int] | np.ndarray) -> WindowBatch:
        """The windows that begin at these positions of the view, without repeats."""
        return self._cut(np.asarray(starts, dtype=np.int64))

    def _cut(self, starts: np.ndarray, repeats_of: tuple[int, range] | None = None) -> WindowBatch:
        """repeats_of: the step and the indices whose repeats the windows have."""
        if len(starts) and not 0 <= starts.min() <= starts.max() < self.num_starts:
            raise ValueError(f"a window of {self.length} must start in 0..{self.num_starts - 1}")
        position = starts[:, None] + np.arange(self.length)
        if self.block_size is None:
            raw, is_landmark, phase = position, np.zeros(position.shape, dtype=bool), None
        else:
            phase = torch.from_numpy(starts % (self.block_size + 1))
            raw, is_landmark = raw_position(position, self.block_size)
        target = raw + ~is_landmark
        if self._repeats is not None and repeats_of is not None:
            first = raw[:, :1]
            sizes = target[:, -1] + 1 - raw[:, 0]
            origins = self._repeats.origins(sizes, self.seed, *repeats_of)
            raw, target = (first + np.take_along_axis(origins, number - first, axis=1) for number in (raw, target))
        tokens = self._tokens[raw].astype(np.int64)
        targets = self._tokens[target].astype(np.int64)
        tokens[is_landmark] = self._landmark
        targets[is_landmark | (tokens == self._eot)] = NO_LOSS
        if begun := len(self._beginning):
            number = (~is_landmark).cumsum(1) - 1  # of a normal token in its window
            first = ~is_landmark & (number < begun)
            tokens[first] = self._beginning[number[first]]
            targets[first & (number < begun - 1)] = NO_LOSS
        return WindowBatch(torch.from_numpy(tokens), torch.from_numpy(targets), phase)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """Starts spread evenly over the view, for validation, (count,) int64."""
        return np.arange(count, dtype=np.int64) * self.num_starts // max(count, 1)


@dataclass(frozen=True)
class Repeats:
    """In a share of the training windows, some stretches of the text are copies of earlier stretches (`data.repeats`).

    So copying pays, and a small model learns to look back. Repeats are made in the raw tokens, before landmarks are
    inserted, so a copy may stand at another place of its block than its source. Two stretches, here of 3 and 2 tokens,
    and then landmarks L with ℓ = 4::

        raw tokens      a b c d e f g h i j k l m
        origins         0 1 2 3 4 5 1 2 3 9 2 3 12
        with repeats    a b c d e f b c d j c d m
        tokens          a b c d L e f b c L d j c d L m

    A window with repeats has one to three of them. The length of each is log-uniform, from 8 tokens to half of the
    window's raw tokens. Source and target are drawn uniformly from all pairs of places that do not overlap. Targets are
    overwritten from left to right, so every copy is in the final text.

    shares: of windows with repeats, at evenly spaced moments of the training, linear between. steps: of the training.
    """

    shares: Sequence[float]
    steps: int

    def share(self, step: int) -> float:
        """Share of windows with repeats in an optimizer step, from 0."""
        return float(np.interp(step, np.linspace(0, max(self.steps - 1, 1), len(self.shares)), self.shares))

    def origins(self, sizes: np.ndarray, seed: int, step: int, indices: range) -> np.ndarray:
        """The raw token of which each is a copy, or itself: (indices, largest size) int64, from each window's first.
        sizes: (indices,) raw tokens of each window, those only predicted included; of fewer than 16 none is a copy.
        """
        drawn = random_numbers(seed, step, REPEATS, indices, (2 + 3 * _MOST,))
        origins = np.tile(np.arange(sizes.max(initial=0)), (len(sizes), 1))
        for window, (chosen, *numbers) in enumerate(drawn.tolist()):
            if fractions(np.uint64(chosen)) < self.share(step) and sizes[window] >= 2 * SHORTEST_REPEAT:
                for source, target, length in _stretches(int(sizes[window]), numbers):
                    origins[window, target : target + length] = origins[window, source : source + length]
        return origins


def _stretches(size: int, numbers: list[int]) -> list[tuple[int, int, int]]:
    """Source, target and length of the stretches of a window, by target. numbers: random, 64 bits each."""
    stretches, (count, *rest) = [], numbers
    for stretch in range(1 + count % _MOST):
        number, *places = rest[3 * stretch : 3 * stretch + 3]
        most = size // 2  # each length with a probability in proportion to log((n + 1) / n)
        length = min(int(SHORTEST_REPEAT * ((most + 1) / SHORTEST_REPEAT) ** float(fractions(np.uint64(number)))), most)
        source, target = sorted(place % (size - 2 * length + 1) for place in places)
        stretches.append((source, target + length, length))
    return sorted(stretches, key=lambda found: found[1])


@dataclass(frozen=True)
class ControlledLandmarks:
    """Those that the context miss token controls (Appendix D): each with probability 0.5. blocks: most of a window."""

    layers: int
    blocks: int

    def for_step(self, seed: int, step: int, indices: range) -> Tensor:
        """Controlled landmarks (indices, layers, blocks), bool, as a function of seed, step and index."""
        drawn = random_numbers(seed, step, CONTROLLED, indices, (self.layers, self.blocks))
        return torch.from_numpy(drawn >> np.uint64(63) == 1)

    def for_validation(self, windows: Sequence[int] | np.ndarray) -> Tensor:
        """Controlled landmarks (windows, layers, blocks), bool, as a function of each window's number."""
        return torch.cat([self.for_step(int(window), _VALIDATION, range(1)) for window in windows])


@dataclass(frozen=True)
class PositionalJumps:
    """In training, positions grow by a random step after each landmark (paper, Appendix E).

    With ℓ = 2, landmarks L and p_jump = 3::

        tokens      a b L c d L e f
        steps           1     3         after landmarks uniform in 1…p_jump, elsewhere 1
        positions   0 1 2 3 4 5 8 9

    length: T, tokens of a window, landmarks included. block_size: ℓ. p_jump: largest step after a landmark.
    """

    length: int
    block_size: int
    p_jump: int

    def positions(self, phase: Tensor, seed: int, step: int, indices: range) -> Tensor:
        """Positions of the tokens of windows `indices` of a step, (indices, T) int64. phase: (indices,), of each."""
        blocks = most_blocks(self.length, self.block_size)
        jumps = random_numbers(seed, step, JUMPS, indices, (blocks,)) % np.uint64(self.p_jump)
        skipped = np.cumsum(np.pad(jumps.astype(np.int64), ((0, 0), (1, 0))), axis=1)  # before each block
        block = (phase.numpy()[:, None] + np.arange(self.length)) // (self.block_size + 1)
        return torch.from_numpy(np.arange(self.length) + np.take_along_axis(skipped, block, axis=1))
