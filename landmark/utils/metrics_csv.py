"""How a training went, from the metrics.csv in its run's folder. Loads no torch."""

import csv
import math
from pathlib import Path
from typing import Any

Metrics = list[dict[str, Any]]


def read_metrics(path: Path) -> Metrics:
    """The lines of a metrics.csv, numbers parsed, blanks left out. Raises ValueError or KeyError where it is none."""
    return [
        {"step": int(row.pop("step")), **{name: float(value) for name, value in row.items() if value}}
        for row in csv.DictReader(whole_lines(path))
    ]


def metrics_so_far(folder: Path) -> Metrics:
    """Those in a run's folder, for who looks on: nothing where there is no metrics.csv, or none that can be read."""
    try:
        return read_metrics(folder / "metrics.csv")
    except (OSError, ValueError, KeyError):
        return []


def whole_lines(path: Path) -> list[str]:
    """Without a last line that is being written, or that a kill cut short; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and line.count(",") == lines[0].count(",")]


def curve(metrics: Metrics, name: str, most: int = 120) -> list[tuple[float, float]]:
    """(step, value) of what was measured and is a number, means over stretches where there are more than `most`."""
    points = [(row["step"], row[name]) for row in metrics if math.isfinite(row.get(name, math.nan))]
    width = -(-len(points) // most) or 1
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    return [(each[-1][0], sum(value for _, value in each) / len(each)) for each in stretches]
