"""Where the keys and values of a layer's blocks lie: on the compute device, in the CPU's memory, on disk.

Landmark keys are always on the device. What a slower tier holds is fetched when it is retrieved, into a cache on the
device, and every tier gives back the numbers that it was given: results are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from landmark.memory.block_cache import BlockCache
from landmark.memory.block_files import FileRows, Saved

TIERS = ("device", "cpu", "disk")


class Fetched(NamedTuple):
    """Blocks on the compute device. keys, values: (m, ℓ, d); rows: (n,), which of them were asked for."""

    keys: Tensor
    values: Tensor
    rows: Tensor

    def read_keys(self, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.keys, 0, self.rows, out=out)

    def read_values(self, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.values, 0, self.rows, out=out)


@dataclass
class TierCounts:
    """Blocks of one head, found in a cache or not; bytes fetched from a slower tier; seconds that took from those who
    waited for them."""

    cache_hits: int = 0
    cache_misses: int = 0
    bytes_moved: int = 0
    seconds_waited: float = 0.0


@dataclass(frozen=True)
class Tier:
    """name: one of TIERS. folder: where files go (None: the system's folder for temporary ones). cache: blocks of
    each layer, all heads, that the device holds of those fetched."""

    name: str = "device"
    folder: Path | None = None
    cache: int = 128
    counts: TierCounts = field(default_factory=TierCounts)

    def blocks(self, like: Tensor, saved: Saved | None = None) -> Blocks:
        """A place for blocks such as `like`, (B, H, n, ℓ, d). saved: rows on disk that it begins with."""
        if self.name == "device":
            return DeviceBlocks(like)
        rows = FileRows(self.folder, saved) if self.name == "disk" else HostRows(pinned=like.is_cuda)
        return FetchedBlocks(like, rows, self.cache, self.counts)


class Blocks(Protocol):
    """Keys and values of blocks in rows 0, 1, 2, …"""

    @property
    def block_shape(self) -> torch.Size: ...
    @property
    def bytes_kept(self) -> int: ...
    @property
    def device_bytes_kept(self) -> int: ...

    def reserve(self, capacity: int) -> None: ...

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Put n blocks, (B, H, n, ℓ, d), in the rows from `row` on."""
        ...

    def rows(self, row: int, count: int) -> Tensor:
        """A copy in the CPU's memory of so many rows, (count, B, H, 2, ℓ, d): keys and values."""
        ...

    def fetch(self, places: Tensor) -> Fetched: ...


class DeviceBlocks:
    """Keys and values on the compute device: (B, H, capacity, ℓ, d)."""

    def __init__(self, like: Tensor | None = None):
        like = torch.empty(0, 0, 0, 0, 0) if like is None else like
        self.keys = self.values = like.new_empty(*like.shape[:2], 0, *like.shape[3:])

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
        def grown(old: Tensor) -> Tensor:
            new = old.new_empty(*old.shape[:2], capacity, *old.shape[3:])
            new[:, :, : old.shape[2]] = old
            return new

        self.keys = grown(self.keys)
        self.values = grown(self.values)

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        self.keys[:, :, row : row + keys.shape[2]] = keys
        self.values[:, :, row : row + keys.shape[2]] = values

    def rows(self, row: int, count: int) -> Tensor:
        return by_row(self.keys[:, :, row : row + count], self.values[:, :, row : row + count])

    def fetch(self, places: Tensor) -> Fetched:
        return Fetched(self.keys.flatten(0, 2), self.values.flatten(0, 2), places)


class FetchedBlocks:
    """Keys and values in the CPU's memory or on disk, and a cache of them on the compute device."""

    def __init__(self, like: Tensor, rows: HostRows | FileRows, cache: int, counts: TierCounts):
        self._shape, self._table, self._counts = like.shape, rows, counts
        self._capacity = 0
        self._cache = BlockCache(cache * self._owners, like)

    @property
    def _owners(self) -> int:
        """Heads of samples."""
        return self._shape[0] * self._shape[1]

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
        like = torch.empty(0, *self._shape[:2], 2, *self._shape[3:], dtype=self._cache.keys.dtype)
        self._table.reserve(capacity, like)
        self._cache.reserve(capacity * self._owners)
        self._capacity = capacity

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        self._cache.forget(row * self._owners, (row + keys.shape[2]) * self._owners)
        self._table.write(row, by_row(keys, values))

    def rows(self, row: int, count: int) -> Tensor:
        out = torch.empty(count, *self._shape[:2], 2, *self._shape[3:], dtype=self._cache.keys.dtype)
        return self._table.read(torch.arange(row, row + count), out.flatten(1)).view_as(out)

    def fetch(self, places: Tensor) -> Fetched:
        owner, row = places // self._capacity, places % self._capacity
        found = self._cache.fetch((row * self._owners + owner).cpu().numpy(), self._table.read_blocks, self._counts)
        return Fetched(*found)


class HostRows:
    """Rows in the CPU's memory, pinned where a device is to copy from it: (capacity, B, H, 2, ℓ, d)."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._rows = torch.empty(0)

    @property
    def bytes_kept(self) -> int:
        return self._rows.nbytes

    def reserve(self, capacity: int, like: Tensor) -> None:
        before = self._rows
        self._rows = torch.empty(capacity, *like.shape[1:], dtype=like.dtype, pin_memory=self._pinned)
        if len(before):
            self._rows[: len(before)] = before

    def write(self, row: int, blocks: Tensor) -> None:
        self._rows[row : row + len(blocks)] = blocks

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Rows into out, (n, B·H·2·ℓ·d)."""
        return torch.index_select(self._rows.flatten(1), 0, rows, out=out)

    def read_blocks(self, places: Tensor, out: Tensor) -> Tensor:
        """Blocks of one head into out, (n, 2·ℓ·d). places: (n,), among all rows, samples and heads."""
        return torch.index_select(self._rows.flatten(0, 2).flatten(1), 0, places, out=out)


def by_row(keys: Tensor, values: Tensor) -> Tensor:
    """(B, H, n, ℓ, d), keys and values → (n, B, H, 2, ℓ, d) in the CPU's memory."""
    return torch.stack([keys, values], 3).permute(2, 0, 1, 3, 4, 5).contiguous().cpu()
