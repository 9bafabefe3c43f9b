"""Tiers store the keys and values of a layer's blocks: on the compute device, in the CPU's memory, or on disk.

Landmark keys are always on the device. Blocks retrieved from a slower tier are fetched into a cache on the device.
Results are the same on every tier, bit for bit.
"""

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from landmark.utils.constants import TIERS
from landmark.utils.errors import UserError

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
Fetch = Callable[[Tensor, Tensor], Tensor]  # reads the blocks at places (n,) into a tensor (n, 2·ℓ·d) on the CPU


def new_buffer(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", pinned: bool = False) -> Tensor:
    """A tensor whose numbers are not set; pinned: in memory of the CPU that a GPU can copy from directly.

    A tensor that is made as usual under `torch.inference_mode` could not be written to outside of it.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def grown(x: Tensor, dim: int, size: int, *, pinned: bool = False) -> Tensor:
    """A copy of x with room for `size` along a dimension, as `new_buffer`; for a moment there are both."""
    shape = *x.shape[:dim], size, *x.shape[dim + 1 :]
    made = new_buffer(*shape, dtype=x.dtype, device=x.device, pinned=pinned)
    made.narrow(dim, 0, x.shape[dim]).copy_(x)
    return made


def mapped_file(numbers: int, dtype: torch.dtype, folder: Path | str | None) -> Tensor:
    """Zeros (numbers,) in a file without a name, which vanishes with the process. folder: None: the system's.

    Its room is taken before it is mapped: where a file has no room for what is written to its map, the system ends the
    process. Raises UserError where no file can be made, or the disk is full.
    """
    folder = Path(folder or tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, numbers) * dtype.itemsize)
            return torch.from_file(file.name, True, max(1, numbers), dtype=dtype)[:numbers]
    except OSError as error:
        raise _refused(folder, error, numbers * dtype.itemsize) from error


def _refused(folder: Path, error: OSError, missing: int) -> UserError:
    """The error for a folder in which a file, or `missing` bytes more of it, cannot be written."""
    why = f"cannot write a file there ({error.strerror})"
    if error.errno in FULL:
        why = f"no room for {missing / 1e6:,.1f} MB more ({error.strerror}); name a folder on a larger disk"
    return UserError(f"memory.folder={folder}: {why}")


@dataclass
class TierCounts:
    """Counts of blocks fetched from a slower tier.

    cache_hits, cache_misses: blocks of one head. bytes_moved: to the compute device.
    """

    cache_hits: int = 0
    cache_misses: int = 0
    bytes_moved: int = 0


class FetchedBlocks:
    """Slots for blocks of one head on the compute device; the CPU knows which block each slot holds.

    keys, values: (slots, ℓ, d). A *place* is the index of a block of one head among all rows, samples and heads. Where
    one fetch needs more blocks than there are slots, the missing blocks bypass the cache.

    On a GPU blocks go through pinned memory and a CUDA stream of their own: work launched before goes on, and work
    launched later waits for the copy. One of two pinned buffers is filled while the other is copied.

    like: (B, H, n, ℓ, d), a tensor with the blocks' shape, type and device.
    """

    def __init__(self, slots: int, like: Tensor):
        self.keys, self.values = new_buffer(2, slots, *like.shape[3:], dtype=like.dtype, device=like.device)
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._staging: list[Tensor] = [torch.empty(0)] * (1 if self._stream is None else 2)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._slot_of = np.empty(0, np.int32)  # by place; −1: not in the cache
        self._place_of = np.full(slots, -1)
        self._used = np.zeros(slots, np.int64)  # by slot: the number of the last fetch that used it; 0: free
        self._clock = 0

    @property
    def bytes_kept(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, places: int) -> None:
        self._slot_of = np.append(self._slot_of, np.full(places - len(self._slot_of), -1, np.int32))

    def forget(self, first: int, stop: int) -> None:
        """Drop the blocks at places first … stop−1, which are about to be overwritten."""
        slots = self._slot_of[first:stop]
        here = slots[slots >= 0]
        self._place_of[here], self._used[here] = -1, 0
        slots[:] = -1

    def fetch(self, places: np.ndarray, read: Fetch, counts: TierCounts) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (m, ℓ, d) among which are the blocks at these places (n,), and the index of each block, (n,).

        read: reads blocks from the slower tier. counts: are updated.
        """
        distinct, index = np.unique(places, return_inverse=True)
        slots = self._slot_of[distinct]
        missing = np.flatnonzero(slots < 0)
        found = slots[slots >= 0]
        counts.cache_hits += len(found)
        counts.cache_misses += len(missing)
        self._clock += 1
        self._used[found] = self._clock
        keys, values = self.keys, self.values
        if len(distinct) > len(self._used):
            keys, values = (x.new_empty(len(distinct), *x.shape[1:]) for x in (keys, values))
            here = self._on_device(np.flatnonzero(slots >= 0))
            keys[here], values[here] = (x[self._on_device(found)] for x in (self.keys, self.values))
            slots = np.arange(len(distinct))
        elif len(missing):
            slots[missing] = self._free(len(missing))
        if len(missing):
            into = self._on_device(slots[missing])
            counts.bytes_moved += self._transfer(read, torch.from_numpy(distinct[missing]), keys, values, into)
            if keys is self.keys:  # only now: a transfer that fails leaves nothing that looks like a block
                self._slot_of[distinct[missing]], self._place_of[slots[missing]] = slots[missing], distinct[missing]
                self._used[slots[missing]] = self._clock
        return keys, values, self._on_device(slots[index])

    def _transfer(self, read: Fetch, places: Tensor, keys: Tensor, values: Tensor, into: Tensor) -> int:
        """Read the blocks at places (n,), copy them to the rows `into` (n,) of keys and values (m, ℓ, d), and return
        their bytes."""
        if self._stream is None:
            blocks = self._staged(read, places)
            keys.index_copy_(0, into, blocks[:, 0])
            values.index_copy_(0, into, blocks[:, 1])
            return blocks.nbytes
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        blocks = self._staged(read, places)
        computing = torch.cuda.current_stream(self.keys.device)
        with torch.cuda.stream(self._stream):
            moved = blocks.to(self.keys.device, non_blocking=True)
            self._stream.wait_stream(computing)  # earlier work may still read the blocks that are overwritten
            keys.index_copy_(0, into, moved[:, 0])
            values.index_copy_(0, into, moved[:, 1])
            copied = torch.cuda.Event()
            copied.record(self._stream)
        for used in (keys, values, into):
            used.record_stream(self._stream)
        computing.wait_event(copied)
        self._copied = [self._copied[1], copied]
        self._staging.reverse()
        return blocks.nbytes

    def _staged(self, read: Fetch, places: Tensor) -> Tensor:
        """Blocks (n, 2, ℓ, d) on the CPU, in a buffer that is used again, because allocating memory is slow."""
        block = self.keys.shape[1:]
        if len(self._staging[0]) < len(places):
            pinned = self._stream is not None
            self._staging[0] = new_buffer(len(places), 2 * block.numel(), dtype=self.keys.dtype, pinned=pinned)
        return read(places, self._staging[0][: len(places)]).view(-1, 2, *block)

    def _free(self, count: int) -> np.ndarray:
        """The least recently used slots, freed; the present fetch does not use them."""
        slots = np.argpartition(self._used, count - 1)[:count]
        before = self._place_of[slots]
        self._slot_of[before[before >= 0]] = -1
        self._place_of[slots], self._used[slots] = -1, 0
        return slots

    def _on_device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.keys.device, non_blocking=True)


class Fetched(NamedTuple):
    """Blocks on the compute device. keys, values: (m, ℓ, d). rows: (n,), the rows of the requested blocks."""

    keys: Tensor
    values: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Store:
    """Where the blocks of each layer of a memory are stored, and how many (`landmarks/settings.py` says more).

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

    def new_blocks(self, like: Tensor, counts: TierCounts) -> "Blocks":
        """Keys and values of no block yet, like (B, H, n, ℓ, d)."""
        if self.tier == "device":
            return DeviceBlocks(like)
        row = torch.empty(*like.shape[:2], 2, *like.shape[3:], dtype=like.dtype)
        rows = FileRows(row, self.folder) if self.tier == "disk" else HostRows(row, pinned=like.is_cuda)
        return CachedBlocks(like, rows, self.cache, counts)


class DeviceBlocks:
    """Keys and values of blocks in rows 0, 1, 2, … on the compute device: (B, H, capacity, ℓ, d)."""

    def __init__(self, like: Tensor | None = None):
        like = torch.empty(0, 0, 0, 0, 0) if like is None else like
        shape = *like.shape[:2], 0, *like.shape[3:]
        self.keys = self.values = new_buffer(*shape, dtype=like.dtype, device=like.device)

    @property
    def bytes_kept(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, capacity: int) -> None:
        self.keys, self.values = (grown(x, 2, capacity) for x in (self.keys, self.values))

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

    def __init__(self, like: Tensor, rows: "HostRows | FileRows", cache: int, counts: TierCounts):
        """Start with no block like (B, H, n, ℓ, d). cache: fetched blocks (all heads) that the device keeps."""
        self._shape, self._table, self._counts = like.shape, rows, counts
        self._capacity, self._heads = 0, like.shape[0] * like.shape[1]  # heads of all samples
        self._cache = FetchedBlocks(cache * self._heads, like)

    @property
    def bytes_kept(self) -> int:
        return self._table.bytes_kept + self._cache.bytes_kept

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
        self._rows = grown(self._rows, 0, capacity, pinned=self._pinned)

    def write(self, row: int, blocks: Tensor) -> None:
        """Write blocks (n, B, H, 2, ℓ, d) to the rows from `row` on."""
        self._rows[row : row + len(blocks)] = blocks

    def read(self, places: Tensor, out: Tensor) -> Tensor:
        """Read blocks of one head into out, (n, 2·ℓ·d). places: (n,), indices among all rows, samples and heads."""
        return torch.index_select(self._rows.view(-1, out.shape[1]), 0, places, out=out)


class FileRows:
    """The same in a file without a name, which vanishes when the process ends, even if killed.

    Rows are read and written at an offset, not through a memory map: that is as fast, and a full disk raises an error,
    where a memory map ends the process with a signal. folder: None: the system's.
    """

    def __init__(self, like: Tensor, folder: Path | str | None):
        """Raises UserError where no file can be made."""
        self._folder, self._row_bytes, self._written = Path(folder or tempfile.gettempdir()), like.nbytes, 0
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (it stays open)
        except OSError as error:
            raise _refused(self._folder, error, 0) from error

    def __getstate__(self) -> object:
        """Raises UserError: a copy would share the file, or be without it."""
        raise UserError("memory.tier=disk: such a memory cannot be copied or pickled, save it and load it")

    @property
    def bytes_kept(self) -> int:
        return self._written * self._row_bytes

    def reserve(self, capacity: int) -> None:
        """Nothing: the file grows with each write."""

    def write(self, row: int, blocks: Tensor) -> None:
        """As of `HostRows`. Raises UserError where the disk is full."""
        left, at = blocks.flatten().view(torch.uint8).numpy().data, row * self._row_bytes
        try:
            while left:
                done = os.pwrite(self._file.fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as error:
            raise _refused(self._folder, error, len(left)) from error
        self._written = max(self._written, row + len(blocks))

    def read(self, places: Tensor, out: Tensor) -> Tensor:
        """As of `HostRows`."""
        whole, piece, file = out.view(torch.uint8).flatten().numpy().data, out[0].nbytes, self._file.fileno()
        offsets = [place * piece for place in places.tolist()]
        for offset in offsets if hasattr(os, "posix_fadvise") else ():  # request all before waiting for the first
            os.posix_fadvise(file, offset, piece, os.POSIX_FADV_WILLNEED)
        for number, offset in enumerate(offsets):
            if os.preadv(file, [whole[number * piece : (number + 1) * piece]], offset) < piece:
                raise UserError(f"memory.folder={self._folder}: a file there was cut short, load the memory again")
        return out


def by_row(keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values (B, H, n, ℓ, d) as rows (n, B, H, 2, ℓ, d) in the CPU's memory."""
    return torch.stack([keys, values], 3).permute(2, 0, 1, 3, 4, 5).contiguous().cpu()


Blocks = DeviceBlocks | CachedBlocks
