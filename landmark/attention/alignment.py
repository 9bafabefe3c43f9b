"""Windows that are cut at different phases, padded so that their blocks line up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockAlignment:
    """Where the windows of n samples lie among whole blocks of `width` = W = ℓ+1 positions.

    Padded tensors are (N, rows, d), N = n · heads. Padded keys begin with block 0, padded queries with block `first`.

    phases: of each sample. prefix, queries, heads: of the attention.
    future: (W, W, 1), for offsets of keys, then of queries, in one block: whether the query does not see the key.
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
        """The inverse of `pad`. padded: some of the rows, from `start` on; the others are not written to x."""
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
    width: int, phases: tuple[int, ...], prefix: int, queries: int, heads: int, device: torch.device
) -> BlockAlignment:
    """The alignment of windows.

    Args:
        width: W = ℓ+1, positions of a block.
        phases: of each sample, tokens missing from its first block.
        prefix: keys before the first query.
        queries: T.
        heads: H.
        device: of the masks.
    """
    offset = torch.arange(width, device=device)
    future = (offset[:, None] > offset) | (offset[:, None] == width - 1)
    hidden = offset[:-1] < torch.tensor(phases, device=device)[:, None]
    hidden = hidden[:, None, :, None] if any(phases) else None
    return BlockAlignment(width, phases, prefix, queries, heads, future[..., None], hidden)
