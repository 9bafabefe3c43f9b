"""A batch of training windows: `data` makes it, `training` cuts it, `models` compute its losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def most_blocks(length: int, block_size: int) -> int:
    """Most blocks of which a window of `length` tokens, landmarks included, can hold a part, over all phases."""
    return (block_size + length - 1) // (block_size + 1) + 1


@dataclass
class WindowBatch:
    """Windows of tokens (B, T) int64, landmarks included, with their targets (B, T) int64, NO_LOSS where there is no
    loss.

    phase: (B,) int64, tokens missing from the first blocks. None without landmarks. weights: (B, T) float32, of the
    targets' loss, mean one. None: all one. controlled: (B, layers, blocks) bool, landmarks that the context miss token
    controls. positions: (B, T) int64. None: 0…T−1. batch_targets: of the device's whole batch, of which these windows
    are a part. None: they are all of it.
    """

    tokens: Tensor
    targets: Tensor
    phase: Tensor | None = None
    weights: Tensor | None = None
    controlled: Tensor | None = None
    positions: Tensor | None = None
    batch_targets: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> WindowBatch:
        """The same batch on another device. The phase stays on the CPU, where attention reads it."""
        moved = replace(self, phase=None)._each(lambda x: x.to(device, non_blocking=non_blocking))
        return replace(moved, phase=self.phase)

    def rows(self, rows: slice) -> WindowBatch:
        """Some of the windows."""
        return self._each(lambda x: x[rows])

    def cut(self, size: int | None) -> Iterator[WindowBatch]:
        """Parts of `size` windows each, the last one perhaps of fewer (None: the whole batch)."""
        size = size or len(self)
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def _each(self, change: Callable[[Tensor], Tensor]) -> WindowBatch:
        given = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **given)
