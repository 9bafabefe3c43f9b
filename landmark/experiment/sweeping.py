"""What kills have left below an output folder, deleted at the start of a command that makes runs or rows."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from landmark.experiment.named_runs import has_weights
from landmark.experiment.records import Records
from landmark.utils.files import delete_leftovers

TEMPORARY = ".*.tmp"  # of `landmark.utils.files.write_atomic`, and of checkpoints
_PLACES = ("", "records/*", "attempts", "launches", "runs/*", "tables/*", "dashboards", "inspect")


def sweep(records: Records, caches: Iterable[str | Path]) -> None:
    """Delete the leftovers of killed processes.

    1. Temporary files that no process is writing.
    2. Notes of attempts that left their record.
    3. Checkpoints of runs that are trained, have their record, and are not locked.

    records: of the output folder. caches: folders of prepared corpora.
    """
    for place in _PLACES:
        for folder in records.output.glob(place) if place else (records.output,):
            delete_leftovers(folder.glob(TEMPORARY))
    for note in (records.output / "attempts").glob("*.json"):
        kind, _, identity = note.stem.partition("-")
        if kind in ("runs", "rows") and records.path(kind, identity).exists():
            note.unlink(missing_ok=True)
    for checkpoints in (records.output / "runs").glob("*/checkpoints"):
        folder = checkpoints.parent
        identity = folder.name.rpartition("-")[2]
        if records.path("runs", identity).exists() and has_weights(folder):
            with suppress(OSError), records.try_lock("runs", identity) as is_ours:
                if is_ours:
                    shutil.rmtree(checkpoints)
    for cache in {Path(each).expanduser().absolute() for each in caches}:
        delete_leftovers(cache.glob(f"*/{TEMPORARY}"))
