"""Accuracy against the length, a panel for each task, a line for each series of rows.

Rows are named `task-series_length`.
"""

from collections.abc import Iterable

from landmark.results.columns import TableRow
from landmark.results.figures.marks import Panel, Point, curves, point
from landmark.results.figures.style import Look, length_axis, percent, series_looks
from landmark.results.tables import Table

_ACROSS = 2  # panels of a line


def panels(table: Table) -> list[list[Panel]]:
    """Percent of prompts answered, or of values recalled, with the interval as bars."""
    found: dict[str, dict[str, list[TableRow]]] = {}
    for row in table.rows:
        task, name = parts(row)
        found.setdefault(task, {}).setdefault(name, []).append(row)
    looks = series_looks(models(table.rows))
    x = length_axis([row.length for row in table.rows])
    y = {"title": "percent (95 % interval)", "scale": {"domain": [-4, 104], "nice": False}}
    drawn = [
        curves(task, [each for name in looks for each in shares(looks, name, of_task.get(name, []))], looks, x, y)
        for task, of_task in found.items()
    ]
    return [drawn[start : start + _ACROSS] for start in range(0, len(drawn), _ACROSS)]


def parts(row: TableRow) -> tuple[str, str]:
    """The task and the series in a row's name; the series is empty where the name has no hyphen."""
    task, _, name = row.series.partition("-")
    return task, name


def models(rows: Iterable[TableRow]) -> dict[str, str]:
    """The model of each series; of its first row, where a series has several."""
    found: dict[str, str] = {}
    for row in rows:
        found.setdefault(parts(row)[1], row.model)
    return found


def shares(looks: dict[str, Look], name: str, rows: list[TableRow]) -> list[Point]:
    """The points of a series: percent of prompts answered, or of values recalled."""
    shift = 2 ** (0.05 * (list(looks).index(name) - (len(looks) - 1) / 2))  # so that error bars stand side by side
    made = []
    for row in sorted(rows, key=lambda row: row.length):
        value, low, high = percent(row)
        if value is not None:
            made.append(point(name, row.length * shift, value, (low, high), row.name))
    return made
