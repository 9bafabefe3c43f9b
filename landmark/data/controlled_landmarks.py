"""Which landmarks the context miss token controls in a training window (paper, Appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landmark.data.random_numbers import CONTROLLED, random_numbers

_VALIDATION = 2**64 - 1  # takes the place of a step


@dataclass(frozen=True)
class ControlledLandmarks:
    """Each landmark is controlled with probability one half, drawn anew in every layer.

    layers: of the model. blocks: most blocks of which a window holds a part.
    """

    layers: int
    blocks: int

    def of_step(self, seed: int, step: int, indices: range) -> Tensor:
        """(indices, layers, blocks) bool: a function of seed, step and index."""
        drawn = random_numbers(seed, step, CONTROLLED, indices, (self.layers, self.blocks))
        return torch.from_numpy(drawn >> np.uint64(63) == 1)

    def of_validation(self, windows: Sequence[int] | np.ndarray) -> Tensor:
        """(windows, layers, blocks) bool: for each window, by its number, the same every time."""
        return torch.cat([self.of_step(int(window), _VALIDATION, range(1)) for window in windows])
