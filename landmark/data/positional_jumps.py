"""Positional jumps: in training, positions grow by a random step after each landmark (paper, Appendix E).

With ℓ = 2, landmarks L and p_jump = 3::

tokens      a b L c d L e f
steps           1     3         after landmarks uniform in 1…p_jump, elsewhere 1
positions   0 1 2 3 4 5 8 9
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landmark.data.random_numbers import JUMPS, random_numbers
from landmark.utils.window_batch import most_blocks


@dataclass(frozen=True)
class PositionalJumps:
    """The positions of training windows.

    length: T, tokens of a window, landmarks included. block_size: ℓ. p_jump: largest step after a landmark.
    """

    length: int
    block_size: int
    p_jump: int

    def positions(self, phase: Tensor, seed: int, step: int, indices: range) -> Tensor:
        """Positions of the tokens of some windows of a step, (indices, T) int64.

        Args:
            phase: (indices,) tokens missing from the first block of each window.
            seed: seed of the training.
            step: optimizer step, from 0.
            indices: windows within the batch of the step.
        """
        blocks = most_blocks(self.length, self.block_size)
        jumps = random_numbers(seed, step, JUMPS, indices, (blocks,)) % np.uint64(self.p_jump)
        skipped = np.cumsum(np.pad(jumps.astype(np.int64), ((0, 0), (1, 0))), axis=1)  # before each block
        block = (phase.numpy()[:, None] + np.arange(self.length)) // (self.block_size + 1)
        return torch.from_numpy(np.arange(self.length) + np.take_along_axis(skipped, block, axis=1))
