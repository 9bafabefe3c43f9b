"""Buffers that are used again: on the CPU, allocating memory takes as long as the arithmetic on it."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class Workspace:
    """Named buffers, each as large as the largest tensor that has used it."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape in the buffer `name`; its values are arbitrary, and the next call overwrites it."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)


class _Kept(threading.local):
    def __init__(self):
        self.spaces: dict[torch.dtype, Workspace] = {}


_kept = _Kept()


def workspace(like: Tensor) -> Workspace:
    """A workspace for tensors with the type and device of `like`.

    On the CPU each thread keeps one for each type, a few tiles large. Elsewhere each call makes a new one, because
    PyTorch's allocator keeps the memory.
    """
    if like.device.type != "cpu":
        return Workspace(like.dtype, like.device)
    if like.dtype not in _kept.spaces:
        _kept.spaces[like.dtype] = Workspace(like.dtype, like.device)
    return _kept.spaces[like.dtype]
