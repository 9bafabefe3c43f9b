"""Records: the small JSON file that a run or a row leaves when it is done; the lock and the note while it is made."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from landmark.experiment.identity import digest
from landmark.experiment.provenance import process, provenance
from landmark.utils.errors import Diverged, Stopped, UserError
from landmark.utils.files import REMEDY, read_json, write_json

Record = dict[str, Any]
Kind = Literal["runs", "rows", "launches"]
_ONE: dict[Kind, str] = {"runs": "run", "rows": "row", "launches": "launch"}
PARTS = {"id": str, "settings": dict, "labels": dict, "results": dict, "provenance": dict}
NOTED = {"id": str, "kind": str, "settings": dict, "labels": dict, "host": str, "pid": int, "time": str}  # of a note
NOTED["error"] = (str, type(None))

_STOPS = (KeyboardInterrupt, Stopped)  # by somebody, or by the machine: no fault

_log = logging.getLogger(__name__)


@dataclass
class Contents:
    """Every record of an output folder by its identity, notes of attempts, and what could not be read."""

    runs: dict[str, Record]
    rows: dict[str, Record]
    attempts: list[Record]
    damaged: list[str]


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

    def read_all(self) -> Contents:
        """Everything in the folder. A record that cannot be read is left out and named in `damaged`."""
        contents = Contents({}, {}, self.attempts(), [])
        kinds: dict[Kind, dict[str, Record]] = {"runs": contents.runs, "rows": contents.rows}
        for kind, found in kinds.items():
            for path in sorted(self.path(kind, "x").parent.glob("*.json")):
                try:
                    found[path.stem] = _with_labels(read_record(path, path.stem), path)
                except UserError as error:
                    contents.damaged.append(str(error))
        return contents

    def write(self, kind: Kind, identity: str, settings: Record, labels: Record, results: Record) -> Record:
        """Write a record.

        Args:
            kind: of a run or a row.
            identity: digest of the settings.
            settings: all that decides the results.
            labels: what people call it: size, data, tokenizer, seed, row, experiment.
            results: numbers and lists of numbers.

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
            record["sha256"] = _sha256(json.loads(json.dumps(record, allow_nan=False)))  # as it will be read
            write_json(self.path(kind, identity), record)
        except ValueError as error:
            raise Diverged(f"{self.path(kind, identity)} was not written: a result is not a finite number") from error
        return record

    @contextmanager
    def lock(self, kind: Kind, identity: str) -> Iterator[None]:
        """A lock that one process at a time holds; the system releases it when that process dies."""
        path = self._lock(kind, identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.info("another process is at work on %s %s: waiting for it", _ONE[kind], identity)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def try_lock(self, kind: Kind, identity: str) -> Iterator[bool]:
        """The same lock if it is free; yields whether it is."""
        path = self._lock(kind, identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(path, timeout=0):
                yield True
        except Timeout:
            yield False

    def is_locked(self, kind: Kind, identity: str) -> bool:
        """Whether a process holds the lock, on this machine or on another that shares the file system's locks."""
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
        """Keep a note while a record is made: the process, and how it ends if it fails. Success deletes the note.

        Args:
            kind: of a run or a row.
            identity: digest of the settings.
            settings: those of the record.
            labels: those of the record, and what `task=status` shows of an unfinished one.
        """
        path = self._attempt(kind, identity)
        note = {"id": identity, "kind": kind, "settings": settings, "labels": labels, "error": None} | process()
        write_json(path, note)
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # a full disk, say, which may be the error itself
                write_json(path, note | {"error": _reason(error), "stopped": isinstance(error, _STOPS)})
            raise
        path.unlink(missing_ok=True)

    def attempts(self) -> list[Record]:
        """Notes of work without a record, at work or ended. A note that cannot be read is left out."""
        notes = []
        for path in sorted(self._attempt("runs", "x").parent.glob("*.json")):
            with suppress(UserError):
                notes.append(read_json(path, NOTED))
        return [note for note in notes if not self.path(note["kind"], note["id"]).exists()]

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


def _with_labels(record: Record, path: Path) -> Record:
    """A record that has the labels and settings that the report reads."""
    for part, keys in {"labels": ("size", "data", "tokenizer", "seed"), "provenance": ("hardware", "time")}.items():
        if missing := [key for key in keys if key not in record[part]]:
            raise UserError(f"{path} is not a whole record, {part}.{missing[0]} is missing: delete it to make it anew")
    return record


def read_record(path: Path, identity: str) -> Record:
    """A record that is whole and is the one its name says. Raises UserError otherwise."""
    record = read_json(path, PARTS)
    if record["id"] != identity:
        raise UserError(f"{path} holds the record {record['id']}, not {identity}: {REMEDY}")
    if (named := digest(record["settings"])) != identity:
        raise UserError(f"{path} was altered: its settings are those of {named}: {REMEDY}")
    if record.get("sha256") not in (None, _sha256(record)):  # those of early versions have none
        raise UserError(f"{path} was altered: its sha256 is another: {REMEDY}")
    return record


def _sha256(record: Record) -> str:
    """Of all other parts of a record."""
    parts = {part: record[part] for part in PARTS}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).hexdigest()
