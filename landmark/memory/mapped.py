"""Rows in a file that is mapped into memory: as many as the disk holds, of which memory holds what is being read."""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from landmark.errors import UserError

RESIDENT = 1 << 22  # bytes read after which the pages they lie in are given back


@dataclass(frozen=True)
class Saved:
    """A file of so many rows."""

    path: Path
    rows: int


class MappedRows:
    """Rows (capacity, B, H, 2, ℓ, d) in a file without a name, which is gone when the process ends, however it ends.

    The first rows may lie in a saved file instead, which is never written to. Rows are written with `pwrite`, so that
    a full disk is an error and not a signal, and read through the mapping.
    """

    def __init__(self, folder: Path | None, saved: Saved | None = None):
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._saved_file, self._saved_rows = saved, 0 if saved is None else saved.rows
        self._own: _Mapped | None = None
        self._saved: _Mapped | None = None
        self._heads = 0  # of all samples

    @property
    def bytes_kept(self) -> int:
        """Of the files; what was reserved and never written takes no place on most disks."""
        return sum(each.size for each in (self._saved, self._own) if each is not None)

    def reserve(self, capacity: int, like: Tensor) -> None:
        """Make room for so many rows. like: (0, B, H, 2, ℓ, d). Raises UserError where there is none, or where the
        saved file is not as long as it should be."""
        self._heads = like.shape[1] * like.shape[2]
        row = math.prod(like.shape[1:]) * like.element_size()
        if self._saved is None and self._saved_file is not None and self._saved_rows:
            path = self._saved_file.path
            self._saved = _Mapped(_open(path), self._saved_rows * row, like.dtype, path)
        size = (capacity - self._saved_rows) * row
        if size <= 0:
            return
        file = self._own.file if self._own is not None else self._temporary()
        try:
            os.ftruncate(file.fileno(), size)
        except OSError as error:
            raise self._no_room(error, size) from error
        self._own = _Mapped(file, size, like.dtype)

    def write(self, row: int, blocks: Tensor) -> None:
        """Raises UserError where the disk is full."""
        assert self._own is not None
        assert row >= self._saved_rows, "saved rows are not overwritten"
        left = blocks.flatten().view(torch.uint8).numpy().data
        at = (row - self._saved_rows) * blocks[0].nbytes
        try:
            while left:
                done = os.pwrite(self._own.file.fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as error:
            raise self._no_room(error, len(left)) from error

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Rows into out, (n, B·H·2·ℓ·d). Raises UserError where a file was removed or cut short."""
        return self._read(rows, self._saved_rows, out)

    def read_blocks(self, places: Tensor, out: Tensor) -> Tensor:
        """Blocks of one head into out, (n, 2·ℓ·d). places: (n,), among all rows, samples and heads. Raises UserError
        as `read`."""
        return self._read(places, self._saved_rows * self._heads, out)

    def _read(self, at: Tensor, saved: int, out: Tensor) -> Tensor:
        """The pieces of out's width at some places, of which the first so many are those of the saved file."""
        if saved == 0 and self._own is not None:
            return self._own.read(at, out)
        found = [(self._saved, at < saved, 0), (self._own, at >= saved, saved)]
        for mapped, here, base in found:
            count = int(here.sum())
            if count == len(at) and mapped is not None:
                return mapped.read(at - base, out)
            if count and mapped is not None:
                out[here] = mapped.read(at[here] - base, out.new_empty(count, out.shape[1]))
        return out

    def _temporary(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise UserError(f"memory.folder={self._folder}: cannot make a file there ({error.strerror})") from error

    def _no_room(self, error: OSError, size: int) -> UserError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return UserError(f"memory.folder={self._folder}: cannot write there ({error.strerror})")
        return UserError(
            f"memory.folder={self._folder}: no room for {size / 1e6:,.1f} MB more of blocks ({error.strerror}); "
            "name a folder on a larger disk, or keep fewer with memory.blocks"
        )


class _Mapped:
    """A file and its mapping. path: where it should be found, None for a file without a name."""

    def __init__(self, file: IO[bytes], size: int, dtype: torch.dtype, path: Path | None = None):
        self.file, self.size, self._path = file, size, path
        self._unread = RESIDENT
        self._check()
        # A private mapping that is not written to is a shared one that need not be writable.
        access = mmap.ACCESS_WRITE if path is None else mmap.ACCESS_COPY
        self._map = mmap.mmap(file.fileno(), size, access=access)
        self._map.madvise(mmap.MADV_RANDOM)
        self._numbers = torch.frombuffer(self._map, dtype=dtype)

    def read(self, at: Tensor, out: Tensor) -> Tensor:
        """Pieces of out's width, at so many times that width, into out (n, width)."""
        self._check()
        piece = out[0].nbytes
        for start in (at * piece).tolist():  # ask for all, before waiting for the first
            inside = start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start - inside, inside + piece)
        torch.index_select(self._numbers.view(-1, out.shape[1]), 0, at, out=out)
        self._unread -= out.nbytes
        if self._unread < 0:
            self._map.madvise(mmap.MADV_DONTNEED)  # they stay in the system's cache of the file
            self._unread = RESIDENT
        return out

    def _check(self) -> None:
        """To read what is no longer there would end the process with a signal."""
        if self._path is None:
            return
        found = os.fstat(self.file.fileno())
        if found.st_nlink == 0:
            raise UserError(f"{self._path} was removed while it was in use: load the memory from where it is now")
        if found.st_size < self.size:
            raise UserError(
                f"{self._path} is cut short: it has {found.st_size:,} bytes of {self.size:,}; save the memory again"
            )


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
