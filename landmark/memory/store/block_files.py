"""Blocks in files, as many as the disk holds. Only rows that are being read are in memory.

Rows are read and written at an offset, not through a memory map: that is as fast, and a full disk or a file cut short
raises an error, where a memory map ends the process with a signal.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from landmark.utils.errors import UserError


@dataclass(frozen=True)
class SavedRows:
    """A file of a saved memory, and the number of its rows."""

    path: Path
    rows: int


class FileRows:
    """Rows (capacity, B, H, 2, ℓ, d) in a file without a name, which vanishes when the process ends, even if killed.

    like: a row. folder: None: the system's. saved: a file with the first rows, which is never written to.
    """

    def __init__(self, like: Tensor, folder: Path | str | None, saved: SavedRows | None = None):
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._saved, self._saved_rows = saved, 0 if saved is None else saved.rows
        self._saved_file: IO[bytes] | None = None
        self._own: IO[bytes] | None = None
        self._row_bytes, self._heads = like.nbytes, like.shape[0] * like.shape[1]  # heads of all samples
        self._written = 0  # rows in the file without a name

    def __getstate__(self) -> object:
        """Raises UserError: a copy would share the file, or be without it."""
        raise UserError("memory.tier=disk: such a memory cannot be copied or pickled, save it and load it")

    @property
    def bytes_kept(self) -> int:
        return (self._saved_rows + self._written) * self._row_bytes

    def reserve(self, capacity: int) -> None:
        """Open the files for `capacity` rows; the file without a name grows with each write.

        Raises UserError where no file can be made, or the saved one cannot be opened.
        """
        if self._saved is not None and self._saved_file is None:
            with _or(f"{self._saved.path}: cannot be read"):
                self._saved_file = open(self._saved.path, "rb", buffering=0)  # noqa: SIM115 (it stays open)
        if capacity > self._saved_rows and self._own is None:
            with _or(f"memory.folder={self._folder}: cannot make a file there"):
                self._own = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115

    def write(self, row: int, blocks: Tensor) -> None:
        """Write blocks (n, B, H, 2, ℓ, d) to the rows from `row` on. Raises UserError where the disk is full."""
        assert self._own is not None
        assert row >= self._saved_rows, "saved rows are not overwritten"
        left = blocks.flatten().view(torch.uint8).numpy().data
        at = (row - self._saved_rows) * self._row_bytes
        try:
            while left:
                done = os.pwrite(self._own.fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as error:
            raise self._cannot_write(error, len(left)) from error
        self._written = max(self._written, row - self._saved_rows + len(blocks))

    def read(self, places: Tensor, out: Tensor) -> Tensor:
        """Read blocks of one head into out, (n, 2·ℓ·d). places: (n,), indices among all rows, samples and heads.

        Raises UserError where a file was removed or cut short.
        """
        if self._saved_file is not None and os.fstat(self._saved_file.fileno()).st_nlink == 0:
            raise UserError(f"{self._path} was removed while it was in use: load the memory again from its new folder")
        whole = out.view(torch.uint8).flatten().numpy().data
        piece, saved = out[0].nbytes, self._saved_rows * self._heads
        pieces = [(self._saved_file, n) if n < saved else (self._own, n - saved) for n in places.tolist()]
        if hasattr(os, "posix_fadvise"):
            for file, place in pieces:  # request all pieces before waiting for the first
                assert file is not None
                os.posix_fadvise(file.fileno(), place * piece, piece, os.POSIX_FADV_WILLNEED)
        for number, (file, place) in enumerate(pieces):
            assert file is not None
            read = os.preadv(file.fileno(), [whole[number * piece : (number + 1) * piece]], place * piece)
            if read < piece:
                raise UserError(
                    f"{self._path} is cut short: {piece - read:,} bytes of a block are missing; save the memory again"
                )
        return out

    @property
    def _path(self) -> Path | str:
        return "the file of the memory" if self._saved is None else self._saved.path

    def _cannot_write(self, error: OSError, size: int) -> UserError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return UserError(f"memory.folder={self._folder}: cannot write there ({error.strerror})")
        return UserError(
            f"memory.folder={self._folder}: no room for {size / 1e6:,.1f} MB more of blocks ({error.strerror}); "
            "name a folder on a larger disk, or keep fewer with memory.blocks"
        )


@contextmanager
def _or(said: str) -> Iterator[None]:
    """An error of the system as one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{said} ({error.strerror})") from error
