"""Windows cut at different phases, side by side: whole blocks that line up, and the memory to lay them out in."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Frame:
    """Where the windows of some samples lie among whole blocks of `width` = ℓ+1 positions.

    future: (W, W, 1), offsets of its own block, then queries, that do not see them. hidden: (n, 1, ℓ, 1), the padding
    of the first block, None where there is none.
    """

    width: int
    phases: tuple[int, ...]
    prefix: int
    queries: int
    heads: int
    future: Tensor
    hidden: Tensor | None

    @property
    def blocks(self) -> int:
        return -(-(self.prefix + self.queries + max(self.phases)) // self.width)

    @property
    def first(self) -> int:
        """The first block with queries."""
        return self.prefix // self.width

    def place(self, x: Tensor, framed: Tensor) -> Tensor:
        """Copy (n, H, T, d), queries or keys, into a frame of them, (N, rows, d), which is returned."""
        framed[:, : 2 * self.width] = 0
        framed[:, -2 * self.width :] = 0
        parts = framed.unflatten(0, (len(x), -1))
        for sample, part, rows in zip(x, parts, self._rows(x.shape[2]), strict=True):
            part[:, rows] = sample
        return framed

    def take(self, framed: Tensor, x: Tensor, start: int = 0) -> None:
        """The inverse of `place`, for the rows of a frame from `start` on that `framed` holds."""
        parts, stop = framed.unflatten(0, (len(x), -1)), start + framed.shape[1]
        for sample, part, rows in zip(x, parts, self._rows(x.shape[2]), strict=True):
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                sample[:, low - rows.start : high - rows.start] = part[:, low - start : high - start]

    def _rows(self, length: int) -> Iterator[slice]:
        """For each sample, in which rows its queries, or its keys, stand."""
        skipped = self.first * self.width if length == self.queries else 0
        end = self.prefix + self.queries - skipped
        return (slice(phase + end - length, phase + end) for phase in self.phases)


@functools.lru_cache(256)
def make_frame(
    width: int, phases: tuple[int, ...], prefix: int, queries: int, heads: int, device: torch.device
) -> Frame:
    offset = torch.arange(width, device=device)
    future = (offset[:, None] > offset) | (offset[:, None] == width - 1)
    hidden = offset[:-1] < torch.tensor(phases, device=device)[:, None]
    hidden = hidden[:, None, :, None] if any(phases) else None
    return Frame(width, phases, prefix, queries, heads, future[..., None], hidden)


class Workspace:
    """Memory that tiles and frames take turns in: fresh memory costs as much as the arithmetic."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
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
    """On the CPU each thread keeps one, a few tiles large, from call to call; elsewhere the allocator does that."""
    if like.device.type != "cpu":
        return Workspace(like.dtype, like.device)
    if like.dtype not in _kept.spaces:
        _kept.spaces[like.dtype] = Workspace(like.dtype, like.device)
    return _kept.spaces[like.dtype]
