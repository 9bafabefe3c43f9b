"""The sessions and documents of a server on disk: one folder for each, of a key.

Each has the ids of its text, the messages of its chat, and a memory that has read a beginning of the text (a folder of
`LandmarkCache.save`), which is written again where much is new. One file names all, and is replaced as a whole: after a
kill at any moment the session is that before the request or after it. One server at a time has the folder; the system
takes the lock from a server that dies.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.trust import inside

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
CONTENT = "content.json"
KEYS = {"saved": dict, "sha256": str}  # of this file
GROWTH = 16  # the memory is written again where at least this part of the text is new
FULL = errno.ENOSPC, errno.EDQUOT
LOG = logging.getLogger(__name__)
LOCK, OWNER = ".lock", "server.json"  # of the folder: locked by the server that has it, and who that is


@dataclass(frozen=True)
class ServerSettings:
    """Where a server keeps memories, who may ask it, and how much.

    keys: a client must send one of them; what belongs to one key, another does not see. The numbers are the most: bytes
    of a request, sessions and documents of a key, bytes of all memories on disk, tokens of an answer, requests that are
    answered at once, and bytes of memories kept for later requests. Raises UserError for values out of range.
    """

    folder: Path
    keys: tuple[str, ...]
    body: int = 16 << 20
    sessions: int = 1000
    disk: int = 64 << 30
    tokens: int = 4096
    requests: int = 256
    reuse: int = 4 << 30

    def __post_init__(self) -> None:
        if not self.keys or not all(self.keys):
            raise UserError("keys: a server needs at least one key that clients send; none is empty")
        for name in ("body", "sessions", "disk", "tokens", "requests", "reuse"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Saved:
    """What is saved of a session or document.

    ids: of its text. before: how many of them come before its chat. chat: its messages, the last answer included.
    memory: the folder of its memory, None: there is none; tokens: of the text that it has read.
    """

    ids: Sequence[int] = ()
    before: int = 0
    chat: Sequence[dict[str, Any]] = ()
    memory: str | None = None
    tokens: int = 0


class Full(UserError):
    """There is no room for another memory."""


class Missing(UserError):
    """There is no memory of this name."""


class Failed(UserError):
    """The server cannot read or write a memory; why, its log says, and the client is not told its paths."""


class Busy(UserError):
    """Another request uses this memory."""


class Memories:
    """The memories of all keys below a folder."""

    def __init__(self, settings: ServerSettings, model: Any):
        """settings: of the server. model: a model with landmarks, whose memories they are.

        Raises UserError where another server has the folder, or it cannot be written to.
        """
        self._settings, self._model = settings, model
        self._lock = _locked(settings.folder)
        self._used: set[Path] = set()
        self._counting = threading.RLock()  # of `_used`; a collected generator may ask for it anywhere
        self._writing = threading.Lock()
        self._sizes: dict[Path, int] = {}  # of the folder of each memory; counted once, and where one is saved
        for folder in settings.folder.glob("*/*/*"):
            if re.fullmatch("[0-9a-f]{32}/(sessions|documents)", folder.parent.relative_to(settings.folder).as_posix()):
                with suppress(UserError):  # a damaged memory is an error where it is asked for
                    _remove_left_over(folder)
                self._count(folder)

    def close(self) -> None:
        self._lock.release()

    @contextmanager
    def using(self, key: str, kind: str, name: str) -> Iterator[None]:
        """While a request uses a memory, raises Busy for another request that would change it."""
        folder = self._folder(key, kind, name)
        with self._counting:
            if folder in self._used:
                raise Busy(f"{kind[:-1]} {name} is answering another request: ask again after it")
            self._used.add(folder)
        try:
            yield
        finally:
            with self._counting:
                self._used.discard(folder)

    def open(self, key: str, kind: str, name: str, *, must_exist: bool) -> Saved:
        """What is saved of a session or document, empty if it is new and need not exist.

        kind: "sessions" or "documents". Raises Missing where it must exist and does not, Failed where it is damaged.
        """
        folder = self._folder(key, kind, name)
        if not (folder / CONTENT).is_file():
            if must_exist:
                raise _missing(kind, name)
            return Saved()
        with self._readable(folder, kind, name):
            return _saved(folder)

    def memory(self, key: str, kind: str, name: str, saved: Saved) -> Any:
        """The memory that is saved. Raises as `open`."""
        folder, cache = self._folder(key, kind, name), self._model.new_memory()
        with self._readable(folder, kind, name):
            cache.load(inside(folder, str(saved.memory)))
        return cache

    @contextmanager
    def _readable(self, folder: Path, kind: str, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UserError) as error:
            if not (folder / CONTENT).is_file():
                raise _missing(kind, name) from error  # deleted meanwhile
            LOG.error("%s %s: %s", kind[:-1], name, error)
            raise Failed(
                f"{kind[:-1]} {name} cannot be read: its files are damaged, or of another model; delete it"
            ) from error

    def list(self, key: str, kind: str) -> list[dict[str, Any]]:
        """The name, and the number of tokens, of each memory of a key. kind: "sessions" or "documents"."""
        found = []
        for path in sorted(self._folder(key, kind, "any").parent.glob(f"*/{CONTENT}")):
            with suppress(UserError):  # damaged, or deleted meanwhile
                found.append({"id": path.parent.name, "tokens": len(_saved(path.parent).ids)})
        return found

    def check_room(self, more: int) -> None:
        """Raise Full where so many bytes more do not fit."""
        used = sum(self._sizes.values())
        if used + more > self._settings.disk:
            raise Full(f"{used:,} bytes of memories: there is no room for {more:,} more; delete some")

    def save(self, key: str, kind: str, name: str, new: Saved, cache: Any, old: Saved = Saved()) -> None:
        """Replace what is saved, and the memory too where much is new. cache: has read a beginning of `new.ids`.

        Raises Full or Failed, and leaves what was there before, where that does not work.
        """
        folder = self._folder(key, kind, name)
        with self._writing, _one_line(f"{kind[:-1]} {name}"):
            others = sum(1 for each in self._sizes if each.parent.parent == folder.parent.parent)
            if folder not in self._sizes and others >= self._settings.sessions:
                raise Full(f"{others} sessions and documents: this server keeps no more; delete one")
            tokens = cache.get_seq_length()
            goes_on = list(new.ids[: old.tokens]) == list(old.ids[: old.tokens])
            grows = not goes_on or (tokens - old.tokens) * GROWTH >= tokens
            new = replace(new, memory=old.memory, tokens=old.tokens)
            self.check_room(cache.stats["bytes_kept"] if grows else 0)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                if grows:
                    new = replace(new, memory=uuid.uuid4().hex, tokens=tokens)
                    cache.save(folder / str(new.memory))
                    self._count(folder)
                    self.check_room(0)
                content = asdict(new)
                write_json(folder / CONTENT, {"saved": content, "sha256": _digest(content)})
            finally:
                _remove_left_over(folder)
                self._count(folder)

    def delete(self, key: str, kind: str, name: str) -> None:
        """Forget a memory. Raises Missing where there is none."""
        folder = self._folder(key, kind, name)
        with self._writing:
            if not (folder / CONTENT).is_file():
                raise _missing(kind, name)
            (folder / CONTENT).unlink()
            shutil.rmtree(folder, ignore_errors=True)
            self._count(folder)

    def _count(self, folder: Path) -> None:
        if size := sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()):
            self._sizes[folder] = size
        else:
            self._sizes.pop(folder, None)

    def _folder(self, key: str, kind: str, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise UserError(f"{kind[:-1]}={name!r}: a name has 1 to 64 letters, digits, dots, dashes and underscores")
        return self._settings.folder / hashlib.sha256(key.encode()).hexdigest()[:32] / kind / name


def _locked(folder: Path) -> FileLock:
    """The lock of a server's folder, held by this process. Raises UserError where another process holds it."""
    lock = FileLock(folder / LOCK, thread_local=False)  # a server stops in another thread
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        with _full_or_not():
            write_json(folder / OWNER, {"host": platform.node(), "pid": os.getpid()})
    except Timeout:
        owner = {"host": "another machine", "pid": "unknown"}
        with suppress(UserError, OSError):  # it may be about to write
            owner = read_json(folder / OWNER, {"host": str, "pid": int})
        raise UserError(
            f"{folder}: a server (process {owner['pid']} on {owner['host']}) keeps its memories here: stop it, or name "
            "another folder with --memories"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: memories cannot be kept here ({error.strerror})") from error
    return lock


@contextmanager
def _full_or_not() -> Iterator[None]:
    """Go on where the disk is full: else nobody could ask the server to delete memories."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        LOG.error("%s: the disk is full: memories can be asked and deleted", error.filename)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Raise Full for a full disk, and Failed for another error of the system. what: the memory."""
    try:
        yield
    except Full:
        raise
    except (OSError, UserError) as error:
        LOG.error("%s: %s", what, error)
        of_system = error if isinstance(error, OSError) else error.__cause__
        if isinstance(of_system, OSError) and of_system.errno in FULL:
            raise Full(f"{what}: the server's disk is full; delete some memories") from error
        raise Failed(f"{what} could not be saved") from error


def _missing(kind: str, name: str) -> Missing:
    return Missing(f"{kind[:-1]} {name}: there is none of this name")


def _saved(folder: Path) -> Saved:
    """What is saved in a folder. Raises UserError where it is damaged."""
    content = read_json(folder / CONTENT, KEYS)
    if _digest(content["saved"]) != content["sha256"]:
        raise UserError(f"{folder / CONTENT} is damaged: delete its folder")
    return Saved(**content["saved"])


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _remove_left_over(folder: Path) -> None:
    """Delete what `save` left in a memory's folder before it failed or was killed: all but its content."""
    kept = {folder / CONTENT, folder / str(_saved(folder).memory)} if (folder / CONTENT).is_file() else set()
    for path in set(folder.iterdir()) - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not kept:
        folder.rmdir()
