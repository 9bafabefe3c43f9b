"""The metrics.csv of a run, with a line for each measured step, earlier attempts included. Loads no torch."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError
from landmark.utils.files import name_in_errors, open_written, write_atomic

COLUMNS = (
    *("step", "train/loss", "train/learning_rate", "train/gradient_norm", "train/tokens_per_second", "train/mfu"),
    *("train/seconds", "train/peak_memory_bytes", "validation/loss", "validation/perplexity"),
)
_REMEDY = "delete it, the training goes on without its earlier lines"
Metrics = list[dict[str, Any]]


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add a line, blank where not measured, and flush it to the disk, before a checkpoint of the step is written."""
    with name_in_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write(_line({"step": step, **metrics}))
        file.flush()
        os.fsync(file.fileno())


def drop_lines_after(path: Path, step: int) -> None:
    """Begin a file, or go on with one after a step, in the present columns. Raises UserError as `read_metrics`."""
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    write_atomic(path, ",".join(COLUMNS) + "\n" + "".join(map(_line, kept)))


def _line(values: Mapping[str, Any]) -> str:
    """A line of the file, numbers with nine digits."""
    shown = {name: str(value) if name == "step" else f"{value:.9g}" for name, value in values.items()}
    return ",".join(shown.get(name, "") for name in COLUMNS) + "\n"


def read_metrics(path: Path) -> Metrics:
    """The lines of a metrics.csv as numbers, without blanks. Raises UserError where it is damaged, or another file."""
    metrics: Metrics = []
    try:
        for row in csv.DictReader(whole_lines(path)):
            metrics.append({"step": int(row.pop("step")), **{name: float(row[name]) for name in row if row[name]}})
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{path} has no column {error.args[0]}: {_REMEDY}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text ({error.reason}): {_REMEDY}") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}, line {len(metrics) + 2}: {error}: {_REMEDY}") from None
    return metrics


def metrics_so_far(folder: Path) -> Metrics:
    """The metrics of a run that may still be training; empty if there is no readable metrics.csv."""
    try:
        return read_metrics(folder / "metrics.csv")
    except (OSError, UserError):
        return []


def whole_lines(path: Path) -> list[str]:
    """The lines of a file without an incomplete last line; empty if there is no file."""
    if not path.exists():
        return []
    with open_written(path, _REMEDY) as file:
        lines = file.read().decode().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and line.count(",") == lines[0].count(",")]
