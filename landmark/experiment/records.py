"""Records: the small JSON file that a run or a row leaves when it is done; the lock and the note while it is made."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from landmark.experiment.provenance import provenance, started
from landmark.utils.errors import Stopped, UserError
from landmark.utils.files import read_json, write_json

Record = dict[str, Any]
Kind = Literal["runs", "rows"]
PARTS = ("id", "settings", "labels", "results", "provenance")
NOTED = ("id", "kind", "settings", "labels", "error", "host", "pid", "time")  # of what has no record yet

_log = logging.getLogger(__name__)


class Records:
    """The records below `output`/records, one file each."""

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)

    def path(self, kind: Kind, identity: str) -> Path:
        return self.output / "records" / kind / f"{identity}.json"

    def find(self, kind: Kind, identity: str) -> Record | None:
        """The record, or None where there is none yet. Raises UserError if it is cut short or misplaced."""
        path = self.path(kind, identity)
        return read_record(path, identity) if path.exists() else None

    def all(self, kind: Kind) -> list[Record]:
        """Every record of a kind, by identity. Raises UserError as `find`."""
        return [read_record(path, path.stem) for path in sorted(self.path(kind, "x").parent.glob("*.json"))]

    def write(
        self,
        kind: Kind,
        identity: str,
        settings: Record,
        labels: Record,
        results: Record,
    ) -> Record:
        """Write a record: the settings that are its identity, labels for people, results, provenance.

        Raises UserError where a result is not a finite number.
        """
        record = {
            "id": identity,
            "settings": settings,
            "labels": labels,
            "results": results,
            "provenance": provenance(),
        }
        try:
            write_json(self.path(kind, identity), record)
        except ValueError as error:
            raise UserError(f"{self.path(kind, identity)} was not written: a result is not a finite number") from error
        return record

    @contextmanager
    def lock(self, kind: Kind, identity: str) -> Iterator[None]:
        """Held by one process at a time; the system lets go of it when that process dies."""
        path = self._lock(kind, identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.info("another process is at work on %s %s: waiting for it", kind.removesuffix("s"), identity)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def is_locked(self, kind: Kind, identity: str) -> bool:
        """Whether a process is at work on it, of this machine or of another that shares the file system's locks."""
        path = self._lock(kind, identity)
        try:
            with FileLock(path, timeout=0) if path.exists() else nullcontext():
                return False
        except Timeout:
            return True
        except OSError:  # in a folder that only others may write to
            return False

    @contextmanager
    def attempt(self, kind: Kind, identity: str, settings: Record, labels: Record) -> Iterator[None]:
        """Around making a record: notes who is at it, and why it failed; taken away when it is done."""
        path = self._attempt(kind, identity)
        note = {"id": identity, "kind": kind, "settings": settings, "labels": labels, "error": None} | started()
        write_json(path, note)
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # a full disk, say, which may be the error itself
                write_json(path, note | {"error": _reason(error)})
            raise
        path.unlink(missing_ok=True)

    def attempts(self) -> list[Record]:
        """What was begun and has no record: at work now, failed, or killed. A note that cannot be read is left out."""
        notes = []
        for path in sorted(self._attempt("runs", "x").parent.glob("*.json")):
            with suppress(UserError):
                notes.append(read_json(path))
        whole = [note for note in notes if isinstance(note, dict) and all(part in note for part in NOTED)]
        return [note for note in whole if not self.path(note["kind"], note["id"]).exists()]

    def _lock(self, kind: Kind, identity: str) -> Path:
        return self.output / "locks" / f"{kind}-{identity}.lock"

    def _attempt(self, kind: Kind, identity: str) -> Path:
        return self.output / "attempts" / f"{kind}-{identity}.json"


def _reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, Stopped):
        return error.message
    said = " ".join(str(error).split())
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}".removesuffix(": ")


def read_record(path: Path, identity: str) -> Record:
    """A record that is whole and is the one its name says. Raises UserError otherwise."""
    record = read_json(path)
    if not isinstance(record, dict) or any(part not in record for part in PARTS):
        raise UserError(f"{path} is not a whole record: delete it to make it anew")
    if record["id"] != identity:
        raise UserError(f"{path} holds the record {record['id']}, not {identity}: delete it to make it anew")
    return record
