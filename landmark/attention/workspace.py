"""Memory that is used again and again: new memory costs as much time as the arithmetic on it."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class Workspace:
    """Named buffers, each as large as the largest tensor that was asked for."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape in the buffer of this name; the numbers in it are arbitrary."""
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
    """A workspace for tensors of this type and device.

    On the CPU each thread keeps one, a few tiles large, from call to call; elsewhere PyTorch's allocator keeps memory.
    """
    if like.device.type != "cpu":
        return Workspace(like.dtype, like.device)
    if like.dtype not in _kept.spaces:
        _kept.spaces[like.dtype] = Workspace(like.dtype, like.device)
    return _kept.spaces[like.dtype]
