"""The documents of a server on disk, below a folder for each key. A document is a folder of `LandmarkCache.save` with a
number as its name, of which the highest counts: after a kill it is the old one or the new one. One server at a time has
the folder; the system takes the lock from one that dies.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from landmark.documents import Document, saved_document, saved_lacks
from landmark.utils.errors import UserError
from landmark.utils.setting import check_field, setting

if TYPE_CHECKING:
    from landmark.models.huggingface import LandmarkCache

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FULL = errno.ENOSPC, errno.EDQUOT
LOG = logging.getLogger(__name__)
LOCK = ".lock"  # of the folder: held by the server that has it


@dataclass(frozen=True)
class ServerSettings:
    """Where a server keeps memories, who may ask it, and its limits (`about`). keys: a client sends one, and sees
    nothing of another. Raises UserError for values out of range.
    """

    folder: Path
    keys: tuple[str, ...]
    body: int = setting(16 << 20, least=1, about="most bytes of a request")
    file: int = setting(256 << 20, least=1, about="most bytes of a file that becomes a document")
    documents: int = setting(1000, least=1, about="most documents of a key")
    disk: int = setting(64 << 30, least=1, about="most bytes of all memories")
    tokens: int = setting(4096, least=1, about="most tokens of an answer")
    requests: int = setting(256, least=1, about="most requests that are answered at once; others wait")
    reuse: int | None = setting(
        None, least=1, about="most bytes of memories kept for texts that begin alike; None: half of the free memory"
    )
    defaults: str = setting(
        "model", choices=("model", "greedy"), about="sampling where a request says nothing: as the model recommends"
    )

    def __post_init__(self) -> None:
        if not self.keys or not all(self.keys):
            raise UserError("keys: a server needs at least one key that clients send; none is empty")
        for item in fields(self):
            if item.metadata:
                check_field(item.name, getattr(self, item.name), item)


class Full(UserError):
    """There is no room for another document."""


class Missing(UserError):
    """There is no document of this name."""


class Failed(UserError):
    """The server cannot read or write a document; why, its log says, and the client is not told its paths."""


class Memories:
    """The documents of all keys below a folder."""

    def __init__(self, settings: ServerSettings, model: Any):
        """model: with landmarks. Raises UserError where another server has the folder, or it cannot be written to."""
        self._settings, self._model = settings, model
        self._lock = _locked(settings.folder)
        self._writing = threading.Lock()
        self._sizes: dict[Path, int] = {}  # of the folder of each document; counted once, and where one is saved
        for folder in settings.folder.glob("*/*"):
            if re.fullmatch("[0-9a-f]{32}", folder.parent.name) and folder.is_dir():
                _remove_left_over(folder)
                self._count(folder)

    def close(self) -> None:
        self._lock.release()

    def ids(self, key: str, name: str) -> list[int]:
        """The ids of a document. Raises Missing where there is none, Failed where it is damaged."""
        from landmark.models.huggingface.landmark_cache import IDS, saved_windows

        return self._read(key, name, lambda folder: saved_windows(folder, ids_alone=True)[IDS][0].tolist())

    def memory(self, key: str, name: str) -> LandmarkCache:
        """The memory that has read a document. Raises as `ids`."""

        def load(folder: Path) -> LandmarkCache:
            cache = self._model.new_memory()
            cache.load(folder)
            return cache

        return self._read(key, name, load)

    def document(self, key: str, name: str, text: str) -> Document:
        """What was read, with its places. text: of its ids. Raises as `ids`."""
        return self._read(key, name, lambda folder: saved_document(folder, text) or Document(name, text))

    def lacks(self, key: str, name: str) -> tuple[str, ...]:
        """What the file of a document did not give, a line each. Raises as `ids`."""
        return self._read(key, name, saved_lacks)

    def _read(self, key: str, name: str, read: Callable[[Path], T]) -> T:
        """The result for the newest folder of a document, which another may replace or delete meanwhile."""
        folder = self._folder(key, name)
        while (newest := _newest(folder)) is not None:
            try:
                return read(newest)
            except (OSError, UserError) as error:
                if newest == _newest(folder):
                    LOG.error("document %s: %s", name, error)
                    raise Failed(
                        f"document {name} cannot be read: its files are damaged, or of another model or settings; "
                        "delete it"
                    ) from error
        raise _missing(name)

    def list(self, key: str) -> dict[str, int]:
        """The tokens of each document of a key, by its name."""
        found = {}
        for folder in sorted(self._folder(key, "any").parent.glob("*")):
            with suppress(UserError):  # damaged, deleted meanwhile, or not of this server
                found[folder.name] = len(self.ids(key, folder.name))
        return found

    @contextmanager
    def upload(self) -> Iterator[BinaryIO]:
        """A file without a name, for the body of a request while it comes. Raises Full or Failed for an error of it."""
        try:
            with TemporaryFile(dir=self._settings.folder) as file:
                yield file
        except OSError:
            with _one_line("the file"):
                raise

    def check_room(self, key: str, name: str, more: int) -> None:
        """Raise UserError for a name that cannot be, and Full where no document of so many bytes fits."""
        folder = self._folder(key, name)
        sizes = dict(self._sizes)  # whole, as another thread may write
        others = sum(1 for each in sizes if each.parent == folder.parent)
        if folder not in sizes and others >= self._settings.documents:
            raise Full(f"{others} documents: this server keeps no more; delete one")
        used = sum(sizes.values())
        if used + more > self._settings.disk:
            raise Full(f"{used:,} bytes of documents: there is no room for {more:,} more; delete some")

    def save(self, key: str, name: str, cache: LandmarkCache, others: Mapping[str, bytes] | None = None) -> None:
        """Replace a document, or add it. cache: has read it. others: as of `LandmarkCache.save`. Raises Full or Failed,
        and changes nothing then.
        """
        folder = self._folder(key, name)
        with self._writing, _one_line(f"document {name}"):
            self.check_room(key, name, cache.nbytes)
            newest = _newest(folder)
            try:
                cache.save(folder / str(1 if newest is None else int(newest.name) + 1), others)
            finally:
                _remove_left_over(folder)
                self._count(folder)

    def delete(self, key: str, name: str) -> None:
        """Forget a document. Raises Missing where there is none."""
        folder = self._folder(key, name)
        with self._writing:
            if _newest(folder) is None:
                raise _missing(name)
            while (newest := _newest(folder)) is not None:  # and an older one that could not be removed
                newest.rename(newest.with_name(f".{newest.name}"))  # so that a kill leaves no part of it
            _remove_left_over(folder)
            self._count(folder)

    def _count(self, folder: Path) -> None:
        if size := sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()):
            self._sizes[folder] = size
        else:
            self._sizes.pop(folder, None)

    def _folder(self, key: str, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise UserError(f"document={name!r}: a name has 1 to 64 letters, digits, dots, dashes and underscores")
        return self._settings.folder / hashlib.sha256(key.encode()).hexdigest()[:32] / name


def _locked(folder: Path) -> FileLock:
    """The lock of a server's folder, held by this process. Raises UserError where another process holds it."""
    lock = FileLock(folder / LOCK, thread_local=False)  # a server stops in another thread
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{folder}: another server keeps its memories here: stop it, or name another folder with --memories"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: memories cannot be kept here ({error.strerror})") from error
    return lock


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Raise Full for a full disk, and Failed for another error of the system. what: the document."""
    try:
        yield
    except Full:
        raise
    except (OSError, UserError) as error:
        LOG.error("%s: %s", what, error)
        system_error = error if isinstance(error, OSError) else error.__cause__
        if isinstance(system_error, OSError) and system_error.errno in FULL:
            raise Full(f"{what}: the server's disk is full; delete some documents") from error
        raise Failed(f"{what} could not be saved") from error


def _missing(name: str) -> Missing:
    return Missing(f"document {name}: there is none of this name")


def _newest(folder: Path) -> Path | None:
    """The folder of a document that counts; None: there is none."""
    numbers = list[int]()
    with suppress(FileNotFoundError):  # it is deleted meanwhile
        numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    return folder / str(max(numbers)) if numbers else None


def _remove_left_over(folder: Path) -> None:
    """Delete what is in a document's folder beside the newest: an older one, and what a kill has left."""
    newest = _newest(folder)
    for path in folder.glob("*"):
        if path != newest and path.name.lstrip(".").partition(".")[0].isdecimal():
            shutil.rmtree(path, ignore_errors=True)
    if newest is None:
        with suppress(OSError):  # it has something else, or there is none
            folder.rmdir()
