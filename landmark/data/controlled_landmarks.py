"""The landmarks that the context miss token controls in training windows (paper, Appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landmark.data.random_numbers import CONTROLLED, random_numbers

_VALIDATION = 2**64 - 1  # used instead of a step


@dataclass(frozen=True)
class ControlledLandmarks:
    """Each landmark is controlled with probability 0.5, independently in every layer.

    layers: number of layers of the model. blocks: most blocks of which a window holds a part.
    """

    layers: int
    blocks: int

    def of_step(self, seed: int, step: int, indices: range) -> Tensor:
        """Controlled landmarks (indices, layers, blocks), bool, as a function of seed, step and index."""
        drawn = random_numbers(seed, step, CONTROLLED, indices, (self.layers, self.blocks))
        return torch.from_numpy(drawn >> np.uint64(63) == 1)

    def of_validation(self, windows: Sequence[int] | np.ndarray) -> Tensor:
        """Controlled landmarks (windows, layers, blocks), bool, as a function of each window's number."""
        return torch.cat([self.of_step(int(window), _VALIDATION, range(1)) for window in windows])
