"""Tiers store the keys and values of a layer's blocks: on the compute device, in the CPU's memory, or on disk.

Landmark keys are always on the device. Blocks retrieved from a slower tier are fetched into a cache on the device.
Results are the same on every tier, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from landmark.memory.settings import TIERS
from landmark.memory.store.block_cache import BlockCache, TierCounts, new_buffer
from landmark.memory.store.block_files import FileRows, SavedRows
from landmark.utils.errors import UserError


class Fetched(NamedTuple):
    """Blocks on the compute device. keys, values: (m, ℓ, d). rows: (n,), the rows of the requested blocks."""

    keys: Tensor
    values: Tensor
    rows: Tensor

    def read_keys(self, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.keys, 0, self.rows, out=out)

    def read_values(self, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.values, 0, self.rows, out=out)


@dataclass(frozen=True)
class Store:
    """Where the blocks of each layer of a memory are stored, and how many (`landmark.memory.settings` says more).

    max_blocks: most blocks of a layer. folder: of files without a name, which vanish with the process. cache: fetched
    blocks (all heads) of a layer that the device holds. Raises UserError for another tier or an empty cache.
    """

    max_blocks: int | None = None
    tier: str = "device"
    folder: Path | str | None = None
    cache: int = 128

    def __post_init__(self):
        if self.tier not in TIERS or self.cache < 1:
            raise UserError(f"tier={self.tier}, cache={self.cache}: must be one of {', '.join(TIERS)}, and at least 1")

    def new_blocks(self, like: Tensor, counts: TierCounts, saved: SavedRows | None = None) -> Blocks:
        """Keys and values of no block yet, like (B, H, n, ℓ, d). saved: the first rows, on disk."""
        if self.tier == "device":
            return DeviceBlocks(like)
        row = torch.empty(*like.shape[:2], 2, *like.shape[3:], dtype=like.dtype)
        rows = FileRows(row, self.folder, saved) if self.tier == "disk" else HostRows(row, pinned=like.is_cuda)
        return CachedBlocks(like, rows, self.cache, counts)


class DeviceBlocks:
    """Keys and values of blocks in rows 0, 1, 2, … on the compute device: (B, H, capacity, ℓ, d)."""

    def __init__(self, like: Tensor | None = None):
        like = torch.empty(0, 0, 0, 0, 0) if like is None else like
        shape = *like.shape[:2], 0, *like.shape[3:]
        self.keys = self.values = new_buffer(*shape, dtype=like.dtype, device=like.device)

    @property
    def block_shape(self) -> torch.Size:
        return self.keys.shape[3:]

    @property
    def bytes_kept(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def device_bytes_kept(self) -> int:
        return self.bytes_kept

    def reserve(self, capacity: int) -> None:
        old, made = (self.keys, self.values), []
        for x in old:
            made.append(new_buffer(*x.shape[:2], capacity, *x.shape[3:], dtype=x.dtype, device=x.device))
            made[-1][:, :, : x.shape[2]] = x
        self.keys, self.values = made

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write n blocks (B, H, n, ℓ, d) to the rows from `row` on."""
        self.keys[:, :, row : row + keys.shape[2]] = keys
        self.values[:, :, row : row + keys.shape[2]] = values

    def rows(self, row: int, count: int) -> Tensor:
        """A copy of `count` rows in the CPU's memory, (count, B, H, 2, ℓ, d): keys and values."""
        return by_row(self.keys[:, :, row : row + count], self.values[:, :, row : row + count])

    def fetch(self, places: Tensor) -> Fetched:
        """The blocks at places (n,): indices of blocks of one head in (B, H, capacity), flattened."""
        return Fetched(self.keys.flatten(0, 2), self.values.flatten(0, 2), places)


class CachedBlocks:
    """The same as `DeviceBlocks`, with rows in the CPU's memory or on disk and a cache on the compute device."""

    def __init__(self, like: Tensor, rows: HostRows | FileRows, cache: int, counts: TierCounts):
        """Start with no block like (B, H, n, ℓ, d). cache: fetched blocks (all heads) that the device keeps."""
        self._shape, self._table, self._counts = like.shape, rows, counts
        self._capacity, self._heads = 0, like.shape[0] * like.shape[1]  # heads of all samples
        self._cache = BlockCache(cache * self._heads, like)

    @property
    def block_shape(self) -> torch.Size:
        return self._shape[3:]

    @property
    def bytes_kept(self) -> int:
        return self._table.bytes_kept + self._cache.bytes_kept

    @property
    def device_bytes_kept(self) -> int:
        return self._cache.bytes_kept

    def reserve(self, capacity: int) -> None:
        self._table.reserve(capacity)
        self._cache.reserve(capacity * self._heads)
        self._capacity = capacity

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        self._cache.forget(row * self._heads, (row + keys.shape[2]) * self._heads)
        self._table.write(row, by_row(keys, values))

    def rows(self, row: int, count: int) -> Tensor:
        out = torch.empty(count, *self._shape[:2], 2, *self._shape[3:], dtype=self._cache.keys.dtype)
        places = torch.arange(row * self._heads, (row + count) * self._heads)
        return self._table.read(places, out.view(len(places), -1)).view_as(out)

    def fetch(self, places: Tensor) -> Fetched:
        head, row = places // self._capacity, places % self._capacity
        found = self._cache.fetch((row * self._heads + head).cpu().numpy(), self._table.read, self._counts)
        return Fetched(*found)


class HostRows:
    """Rows (capacity, B, H, 2, ℓ, d) in the CPU's memory. like: a row. pinned: a GPU can copy from it directly."""

    def __init__(self, like: Tensor, pinned: bool):
        self._pinned, self._rows = pinned, like[None][:0]

    @property
    def bytes_kept(self) -> int:
        return self._rows.nbytes

    def reserve(self, capacity: int) -> None:
        old, shape = self._rows, (capacity, *self._rows.shape[1:])
        self._rows = new_buffer(*shape, dtype=old.dtype, pinned=self._pinned)
        self._rows[: len(old)] = old

    def write(self, row: int, blocks: Tensor) -> None:
        """Write blocks (n, B, H, 2, ℓ, d) to the rows from `row` on."""
        self._rows[row : row + len(blocks)] = blocks

    def read(self, places: Tensor, out: Tensor) -> Tensor:
        """Read blocks of one head into out, (n, 2·ℓ·d). places: (n,), indices among all rows, samples and heads."""
        return torch.index_select(self._rows.view(-1, out.shape[1]), 0, places, out=out)


def by_row(keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values (B, H, n, ℓ, d) as rows (n, B, H, 2, ℓ, d) in the CPU's memory."""
    return torch.stack([keys, values], 3).permute(2, 0, 1, 3, 4, 5).contiguous().cpu()


Blocks = DeviceBlocks | CachedBlocks
