"""Windows that are cut at different phases, padded so that their blocks line up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockAlignment:
    """The rows of padded tensors that hold the windows of n samples.

    Padded tensors are (N, rows, d), N = n · heads, their rows whole blocks. Padded keys begin with block 0, padded
    queries with block `first`.

    width: W = ℓ+1, positions of a block.
    phases: tokens missing from the first block of each sample.
    prefix, queries, heads: keys before the first query, T, H.
    future: (W, W, 1), indexed by the offsets of a key and of a query in one block: whether the key is hidden from the
        query, because it is later or the block's landmark.
    hidden: (n, 1, ℓ, 1), whether a token of the first block is padding; None: there is no padding.
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

    def pad(self, x: Tensor, padded: Tensor) -> Tensor:
        """Copy (n, H, T, d), queries or keys, into (N, rows, d), which is returned."""
        padded[:, : 2 * self.width] = 0
        padded[:, -2 * self.width :] = 0
        parts = padded.unflatten(0, (len(x), -1))
        for sample, part, rows in zip(x, parts, self._rows(x.shape[2]), strict=True):
            part[:, rows] = sample
        return padded

    def unpad(self, padded: Tensor, x: Tensor, start: int = 0) -> None:
        """The inverse of `pad`. padded: the rows from `start` on, all or some; x is written only where they reach."""
        parts, stop = padded.unflatten(0, (len(x), -1)), start + padded.shape[1]
        for sample, part, rows in zip(x, parts, self._rows(x.shape[2]), strict=True):
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                sample[:, low - rows.start : high - rows.start] = part[:, low - start : high - start]

    def _rows(self, length: int) -> Iterator[slice]:
        """The rows of each sample's queries, or keys, in the padded tensor."""
        skipped = self.first * self.width if length == self.queries else 0
        end = self.prefix + self.queries - skipped
        return (slice(phase + end - length, phase + end) for phase in self.phases)


@functools.lru_cache(256)
def align_blocks(
    width: int,
    phases: tuple[int, ...],
    prefix: int,
    queries: int,
    heads: int,
    device: torch.device,
) -> BlockAlignment:
    """The alignment of the windows of a batch, computed once for the same arguments.

    Args:
        width: W = ℓ+1, positions of a block.
        phases: tokens missing from the first block of each sample.
        prefix: keys before the first query.
        queries: T.
        heads: H.
        device: where the masks are.
    """
    offset = torch.arange(width, device=device)
    future = (offset[:, None] > offset) | (offset[:, None] == width - 1)
    hidden = offset[:-1] < torch.tensor(phases, device=device)[:, None]
    hidden = hidden[:, None, :, None] if any(phases) else None
    return BlockAlignment(width, phases, prefix, queries, heads, future[..., None], hidden)
