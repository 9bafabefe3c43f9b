"""Windows that are cut at different phases, padded so that their blocks line up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    local_blocks: blocks beside a query's own that no landmark gates.
    bidirectional: whether queries see later blocks.
    behind: (n, 1, up to 2, W, 1), whether a row of the last blocks is padding; None: causality hides it.
    empty: (n, 1, blocks, W, 1), whether a row is a place without a token; None: there are none.
    """

    width: int
    phases: tuple[int, ...]
    prefix: int
    queries: int
    heads: int
    future: Tensor
    hidden: Tensor | None
    local_blocks: int = 0
    bidirectional: bool = False
    behind: Tensor | None = None
    empty: Tensor | None = None

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

    def with_empty(self, empty: Tensor) -> BlockAlignment:
        """The same windows, whose keys have empty places: (n, prefix + T), bool."""
        padded = empty.new_zeros(len(empty), self.blocks * self.width)
        for sample, part, rows in zip(empty, padded, self._rows(empty.shape[1]), strict=True):
            part[rows] = sample
        return replace(self, empty=padded.unflatten(1, (-1, self.width))[:, None, ..., None])

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
    local_blocks: int = 0,
    bidirectional: bool = False,
) -> BlockAlignment:
    """The alignment of the windows of a batch, computed once for the same arguments.

    Args:
        width: W = ℓ+1, positions of a block.
        phases: tokens missing from the first block of each sample.
        prefix: keys before the first query.
        queries: T.
        heads: H.
        device: where the masks are.
        local_blocks, bidirectional: as in `BlockAlignment`.
    """
    offset = torch.arange(width, device=device)
    future = (offset[:, None] > offset) | (offset[:, None] == width - 1)
    hidden = offset[:-1] < torch.tensor(phases, device=device)[:, None]
    hidden = hidden[:, None, :, None] if any(phases) else None
    alignment = BlockAlignment(width, phases, prefix, queries, heads, future[..., None], hidden, local_blocks)
    if not bidirectional:
        return alignment
    last = torch.arange(alignment.blocks * width, device=device)[-2 * width :]
    ends = prefix + queries + torch.tensor(phases, device=device)
    behind = (last >= ends[:, None]).unflatten(1, (-1, width))[:, None, ..., None]
    return replace(alignment, bidirectional=True, behind=behind)
