"""Landmarks as a view over a stream, and the training windows that are cut from it.

The view of a stream has a landmark at each position p with p mod W = ℓ (ℓ = block_size, W = ℓ+1), and the raw
token number p − ⌊p/W⌋ at every other. A window is a stretch of the view. With ℓ = 3, landmarks L, end of text
E, and a window of T = 9 cut from position 1 (its phase: 1 mod W)::

    raw stream       a  b  c  d  e  E  f  g  h  i  …
    position         0  1  2  3  4  5  6  7  8  9 10 11 …
    view             a  b  c  L  d  e  E  L  f  g  h  L …
    window: tokens      b  c  L  d  e  E  L  f  g
    window: targets     c  d  -  e  E  -  -  g  h

A landmark is never predicted: before one, the target is the token after it. No loss (`-`, NO_LOSS) where the
input is a landmark or end of text. So targets reach at most two positions past the window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.data.stream import Stream

NO_LOSS = -100


@dataclass
class Batch:
    """Windows and what they are to predict.

    tokens: (B, T) int64, landmarks included
    targets: (B, T) int64, NO_LOSS where no loss is taken
    phase: (B,) int64, tokens missing from each window's first block; None without landmarks
    weights: (B, T) float32, of the loss of each target, of mean one; None: all one
    controlled: (B, layers, blocks) bool, landmarks that the context miss token controls; None without it
    positions: (B, T) int64; None: 0…T−1
    """

    tokens: Tensor
    targets: Tensor
    phase: Tensor | None = None
    weights: Tensor | None = None
    controlled: Tensor | None = None
    positions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on another device. The phase stays: it says where to cut, and is read on the CPU."""
        moved = replace(self, phase=None)._each(lambda x: x.to(device, non_blocking=non_blocking))
        return replace(moved, phase=self.phase)

    def rows(self, rows: slice) -> "Batch":
        """Some of the windows."""
        return self._each(lambda x: x[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        given = {name: change(x) for name, x in vars(self).items() if x is not None}
        return replace(self, **given)


def viewed_length(raw_length: int, block_size: int | None) -> int:
    """Positions of the view of `raw_length` tokens: a landmark after every full block; None: no landmarks."""
    return raw_length if block_size is None else raw_length + raw_length // block_size


def landmark_view(tokens: np.ndarray, start: int, length: int, block_size: int, landmark: int) -> np.ndarray:
    """(length,) int64: positions [start, start + length) of the view of a stream.

    tokens: (N,) raw ids. Raises ValueError when the positions reach beyond the view.
    """
    if start < 0 or start + length > viewed_length(len(tokens), block_size):
        raise ValueError(f"positions {start}..{start + length} reach beyond the view of {len(tokens)} tokens")
    position = np.arange(start, start + length)
    raw, is_landmark = raw_position(position, block_size)
    view = np.full(length, landmark, dtype=np.int64)
    view[~is_landmark] = tokens[raw[~is_landmark]]
    return view


class TrainingWindows:
    """Windows of a stream at random starts: a pure function of (seed, step, index).

    Starts are uniform in 0…N−T−2, N being the length of the view. They come from the counter-based Philox
    generator with the key (seed, step), one 64-bit number an index: any slice of any batch can be made alone.
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
    ):
        """`length`: T, landmarks included. Raises UserError: stream too short; a setting out of range."""
        if length < 1 or batch_size < 1 or (block_size is not None and block_size < 1) or seed < 0:
            raise UserError(
                f"train.length={length}, train.batch_size={batch_size} and model.block_size={block_size} "
                f"must be at least 1, seed={seed} at least 0"
            )
        self._tokens = np.asarray(stream if isinstance(stream, np.ndarray) else stream.tokens)
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.block_size = block_size
        self._landmark = landmark
        self._eot = eot
        self.num_starts = viewed_length(len(self._tokens), block_size) - length - 1
        """How many different starts there are."""
        if self.num_starts < 1:
            raise UserError(
                f"train.length={length} is too long for a split of {len(self._tokens)} tokens: "
                "lower it or take more text"
            )

    def batch(self, step: int, indices: range | None = None) -> Batch:
        """Windows `indices` (all, by default) of the batch of a step, the first being 0."""
        starts = self.starts(step)
        return self.at(starts if indices is None else starts[indices.start : indices.stop : indices.step])

    def starts(self, step: int) -> np.ndarray:
        """(batch_size,) int64: positions of the view where the windows of a step begin."""
        key = np.array([self.seed, step], dtype=np.uint64)
        draws = np.random.Philox(key=key).random_raw(self.batch_size)
        return (draws % np.uint64(self.num_starts)).astype(np.int64)

    def at(self, starts: Sequence[int] | np.ndarray) -> Batch:
        """The windows that begin at these positions of the view."""
        starts = np.asarray(starts, dtype=np.int64)
        if len(starts) and not 0 <= starts.min() <= starts.max() < self.num_starts:
            raise ValueError(f"a window of {self.length} must start in 0..{self.num_starts - 1}")
        position = starts[:, None] + np.arange(self.length)
        if self.block_size is None:
            tokens = self._tokens[position].astype(np.int64)
            targets = self._tokens[position + 1].astype(np.int64)
            targets[tokens == self._eot] = NO_LOSS
            return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None)
        raw, is_landmark = raw_position(position, self.block_size)
        tokens = self._tokens[raw].astype(np.int64)
        targets = self._tokens[raw + ~is_landmark].astype(np.int64)
        tokens[is_landmark] = self._landmark
        targets[is_landmark | (tokens == self._eot)] = NO_LOSS
        phase = starts % (self.block_size + 1)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(phase))

    def evenly_spaced(self, count: int) -> np.ndarray:
        """(count,) int64: starts spread evenly over the view, for validation."""
        return np.arange(count, dtype=np.int64) * self.num_starts // max(count, 1)


def raw_position(position: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The raw token at each position of the view (at a landmark: the next), and where landmarks stand."""
    landmarks_before = position // (block_size + 1)
    is_landmark = position - landmarks_before * (block_size + 1) == block_size
    return position - landmarks_before, is_landmark
