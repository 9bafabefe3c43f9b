"""The files of an output folder, compared with those of a table that was never killed."""

import csv
import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from benchmarks.survival.victim import lock_files
from landmark.utils.files import sha256_file
from landmark.utils.metrics_csv import read_metrics

# The hash of a record is of its timings too.
TIMINGS = {
    "sha256",
    "seconds",
    "seconds_searching",
    "tokens_per_second",
    "peak_memory_bytes",
    "mfu",
    "time",
}
TIMED_COLUMNS = TIMINGS | {"resident_bytes", "searching"}


def records(output: Path) -> dict[str, Any]:
    """Every record by its file, without timings. Raises ValueError for a record that is cut short."""
    return {
        str(path.relative_to(output)): without_timings(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((output / "records").rglob("*.json"))
    }


def without_timings(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    return {key: without_timings(value) for key, value in found.items() if key not in TIMINGS}


def wrong_records(output: Path, reference: Path) -> list[str]:
    """Records that differ from the reference's; a missing record is not wrong."""
    expected = records(reference)
    return [path for path, record in records(output).items() if record != expected.get(path)]


def content(output: Path) -> dict[str, Any]:
    """All files of a finished table, without timings: tokens, weights, metrics, records, table."""
    found = records(output)
    for path in [*output.glob("data/*/*.bin"), *output.glob("runs/*/model.safetensors")]:
        found[str(path.relative_to(output))] = sha256_file(path)
    for path in output.glob("data/*/manifest.json"):
        found[str(path.relative_to(output))] = without_timings(json.loads(path.read_text(encoding="utf-8")))
    for path in output.glob("runs/*/metrics.csv"):
        rows = [{key: row[key] for key in row if key.rpartition("/")[2] not in TIMINGS} for row in read_metrics(path)]
        found[str(path.relative_to(output))] = rows
    for path in output.glob("tables/*/*.csv"):
        rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        found[path.name] = [{key: row[key] for key in row if key not in TIMED_COLUMNS} for row in rows]
    return found


def differences(output: Path, reference: Path) -> list[str]:
    """Files in which a finished table differs from the reference, and files and locks that killed processes left."""
    ours, theirs = content(output), content(reference)
    differing = [path for path in sorted(ours.keys() | theirs.keys()) if ours.get(path) != theirs.get(path)]
    return [*differing, *leftovers(output), *(str(path) for path in locked(output))]


def leftovers(output: Path) -> list[str]:
    """Temporary files and folders, and checkpoints."""
    left = [path for path in output.rglob("*") if path.name.endswith((".tmp", ".partial")) or path.suffix == ".ckpt"]
    return [str(path.relative_to(output)) for path in left]


def locked(output: Path) -> list[Path]:
    """Locks that some process holds."""
    return [path for path in lock_files(output) if not _free(path)]


def _free(path: Path) -> bool:
    try:
        with FileLock(path).acquire(timeout=0):
            return True
    except Timeout:
        return False
