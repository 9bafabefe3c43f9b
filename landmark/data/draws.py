"""What a window of a landmark model draws beside its text: controlled landmarks, and positional jumps.

With the context miss token each landmark is controlled with probability one half, anew in every layer (paper, Appendix
D). With positional jumps a random step follows each landmark (paper, Appendix E; here of at most p_jump = 3)::

    tokens      a b L c d L e f
    steps           1     3         uniform in 1…p_jump, elsewhere 1
    positions   0 1 2 3 4 5 8 9

All draws are a pure function of (seed, step, index), as the text is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landmark.data.windows import Batch

CONTROLLED, JUMPS = 1, 2  # of one key, streams of random numbers that never meet; where windows start is 0
VALIDATION = 2**64 - 1  # takes the place of a step


@dataclass(frozen=True)
class Draws:
    """length: T of the windows, landmarks included. cmt_layers: layers that draw controlled landmarks; 0: no context
    miss token. p_jump: largest step after a landmark; 1: no jumps."""

    length: int
    block_size: int
    cmt_layers: int = 0
    p_jump: int = 1

    def train(self, batch: Batch, seed: int, step: int, indices: range) -> Batch:
        """The batch, windows `indices` of a step's, with what they draw."""
        controlled = self._controlled(seed, step, indices)
        positions = None if self.p_jump == 1 else self._positions(batch, seed, step, indices)
        return replace(batch, controlled=controlled, positions=positions)

    def validate(self, batch: Batch, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The batch, windows with these numbers, with landmarks controlled as in training, and without jumps."""
        if not self.cmt_layers:
            return batch
        drawn = [self._controlled(int(number), VALIDATION, range(1)) for number in numbers]
        return replace(batch, controlled=torch.cat([each for each in drawn if each is not None]))

    def _controlled(self, seed: int, step: int, indices: range) -> Tensor | None:
        if not self.cmt_layers:
            return None
        draws = _random(seed, step, CONTROLLED, indices, (self.cmt_layers, self._blocks))
        return torch.from_numpy(draws >> np.uint64(63) == 1)

    def _positions(self, batch: Batch, seed: int, step: int, indices: range) -> Tensor:
        assert batch.phase is not None
        draws = _random(seed, step, JUMPS, indices, (self._blocks,)) % np.uint64(self.p_jump)
        beyond = np.cumsum(np.pad(draws.astype(np.int64), ((0, 0), (1, 0))), axis=1)  # of all landmarks before a block
        block = (batch.phase.numpy()[:, None] + np.arange(self.length)) // (self.block_size + 1)
        return torch.from_numpy(np.arange(self.length) + np.take_along_axis(beyond, block, axis=1))

    @property
    def _blocks(self) -> int:
        """Blocks that a window can have a part of."""
        return (self.block_size + self.length - 1) // (self.block_size + 1) + 1


def _random(seed: int, step: int, stream: int, indices: range, shape: tuple[int, ...]) -> np.ndarray:
    """uint64 (indices, *shape): each index has its own, however many are asked for."""
    philox = np.random.Philox(key=np.array([seed, step], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64))
    return philox.random_raw(indices.stop * math.prod(shape)).reshape(-1, *shape)[indices.start :]
