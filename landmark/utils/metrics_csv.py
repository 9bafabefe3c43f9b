"""Read the metrics.csv of a run, without torch."""

import csv
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError
from landmark.utils.files import open_written

_REMEDY = "delete it, the training goes on without its earlier lines"
Metrics = list[dict[str, Any]]


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
