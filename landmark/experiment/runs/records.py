"""Records: the small JSON file that a run or a row leaves when it is done, and the lock while it is made."""

import logging
import os
import platform
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from landmark.experiment.config.command_line import typed_words
from landmark.experiment.runs.identity import digest
from landmark.experiment.runs.jobs import has_weights
from landmark.utils.errors import Diverged, UserError
from landmark.utils.files import REMEDY, delete_leftovers, held_lock, read_sealed, sealed, write_json
from landmark.utils.hardware import hardware
from landmark.utils.source_tree import commit

Record = dict[str, Any]
Kind = Literal["runs", "rows"]
PARTS = {"id": str, "settings": dict, "labels": dict, "results": dict, "provenance": dict}
PACKAGES = ("landmark", "torch", "triton", "lightning", "numpy", "hydra-core", "tiktoken", "datasets")
TEMPORARY = ".*.tmp"  # of `landmark.utils.files.atomic_file`
_SHOWN = ("size", "data", "tokenizer", "experiment", "row", "run")  # labels that tables and pictures show
_PLACES = ("", "records/*", "runs/*", "tables/*", "dashboards", "inspect")  # where they may be

_log = logging.getLogger(__name__)


@dataclass
class Contents:
    """Every record of an output folder by its identity, and what could not be read."""

    runs: dict[str, Record]
    rows: dict[str, Record]
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

    def read_all(self) -> Contents:
        """Everything in the folder, damaged records by name. Raises UserError for a folder that cannot be read."""
        contents = Contents({}, {}, [])
        kinds: dict[Kind, dict[str, Record]] = {"runs": contents.runs, "rows": contents.rows}
        for kind, found in kinds.items():
            folder = self.path(kind, "x").parent
            try:
                names = sorted(os.listdir(folder))
            except FileNotFoundError:
                continue
            except OSError as error:  # what is there is not missing
                raise UserError(f"{folder} cannot be read ({error.strerror}): make it a readable folder") from error
            for path in (folder / name for name in names if name.endswith(".json")):
                try:
                    found[path.stem] = read_record(path, path.stem)
                except UserError as error:
                    contents.damaged.append(str(error))
        return contents

    def write(
        self, kind: Kind, identity: str, settings: Record, labels: Record, results: Record, weights: str | None = None
    ) -> Record:
        """Write a record. settings: all that decides the results; identity is their digest. labels: what people call
        it. weights: as `Run.weights`. Raises UserError where a result is not a finite number.
        """
        parts = {"settings": settings, "labels": labels, "results": results}
        try:
            record = sealed({"id": identity, **parts, "provenance": provenance() | {"weights": weights}})
            write_json(self.path(kind, identity), record)
        except ValueError as error:
            raise Diverged(f"{self.path(kind, identity)} was not written: a result is not a finite number") from error
        return record

    @contextmanager
    def lock(self, kind: Kind, identity: str) -> Iterator[None]:
        """A lock that one process at a time holds; the system releases it when that process dies."""
        path = self._lock(kind, identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        said = "another process is at work on %s %s: waiting for it", kind.removesuffix("s"), identity
        with held_lock(path, lambda: _log.info(*said)):
            yield

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
        with suppress(OSError):  # in a folder that only others may write to
            if self._lock(kind, identity).exists():
                with self.try_lock(kind, identity) as is_free:
                    return not is_free
        return False

    def _lock(self, kind: Kind, identity: str) -> Path:
        return self.output / "locks" / f"{kind}-{identity}.lock"


def read_record(path: Path, identity: str) -> Record:
    """A record that is whole and is the one its name says. Raises UserError otherwise."""
    record = read_sealed(path, PARTS)
    if record["id"] != identity:
        raise UserError(f"{path} holds the record {record['id']}, not {identity}: {REMEDY}")
    if (named := digest(record["settings"])) != identity:
        raise UserError(f"{path} was altered: its settings are those of {named}: {REMEDY}")
    for key in _SHOWN:
        if not isinstance(value := record["labels"].get(key, ""), str) or not value.isprintable():
            raise UserError(f"{path}: labels: {key} is {value!r}, no line of plain text: {REMEDY}")
    return record


def sweep(records: Records, caches: Iterable[str | Path]) -> None:
    """Delete what killed processes left: temporary files, also in `caches`, and checkpoints of recorded runs."""
    for place in _PLACES:
        for folder in records.output.glob(place) if place else (records.output,):
            delete_leftovers(folder.glob(TEMPORARY))
    for checkpoints in (records.output / "runs").glob("*/checkpoints"):
        folder = checkpoints.parent
        identity = folder.name.rpartition("-")[2]
        if records.path("runs", identity).exists() and has_weights(folder):
            with suppress(OSError), records.try_lock("runs", identity) as is_ours:
                if is_ours:
                    shutil.rmtree(checkpoints)
    for cache in {Path(each).expanduser().absolute() for each in caches}:
        delete_leftovers(cache.glob(f"*/{TEMPORARY}"))


def provenance() -> dict[str, Any]:
    """Where a result comes from: commit, versions, hardware, command line, UTC time."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "command": shlex.join(typed_words()),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
