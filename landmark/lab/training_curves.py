"""How a training went, from the metrics.csv in its run's folder. Loads no torch."""

import csv
import math
from pathlib import Path

Metrics = list[dict[str, float]]


def read_metrics(folder: Path) -> Metrics:
    """The steps measured so far, blanks left out; nothing of a last line that is being written, or of no CSV at all."""
    try:
        lines = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return []
    whole = [line for line in lines if line.endswith("\n") and line.count(",") == lines[0].count(",")]
    try:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(whole)]
    except ValueError:
        return []


def curve(metrics: Metrics, name: str, most: int = 120) -> list[tuple[float, float]]:
    """(step, value) of what was measured and is a number, means over stretches where there are more than `most`."""
    points = [(row["step"], row[name]) for row in metrics if "step" in row and math.isfinite(row.get(name, math.nan))]
    width = -(-len(points) // most) or 1
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    return [(each[-1][0], sum(value for _, value in each) / len(each)) for each in stretches]
