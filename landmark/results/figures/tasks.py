"""Accuracy against the length, a panel for each task, a line for each series of rows.

Rows are named `task-series_length`.
"""

from itertools import cycle

from landmark.results.columns import TableRow
from landmark.results.figures.marks import Panel, Point, curves, point
from landmark.results.figures.style import BEYOND_PALETTE, COLOURS, PALETTE, SHAPES, Look, length_axis
from landmark.results.tables import Table

_ACROSS = 2  # panels of a line


def panels(table: Table) -> list[list[Panel]]:
    """Percent of prompts answered, or of values recalled, with the interval as bars."""
    found: dict[str, dict[str, list[TableRow]]] = {}
    for row in table.rows:
        task, name = parts(row)
        found.setdefault(task, {}).setdefault(name, []).append(row)
    looks = series_looks(table)
    x = length_axis([row.length for row in table.rows])
    y = {"title": "percent (95 % interval)", "scale": {"domain": [-4, 104], "nice": False}}
    drawn = [
        curves(task, [each for name in looks for each in _points(looks, name, of_task.get(name, []))], looks, x, y)
        for task, of_task in found.items()
    ]
    return [drawn[start : start + _ACROSS] for start in range(0, len(drawn), _ACROSS)]


def parts(row: TableRow) -> tuple[str, str]:
    """The task and the series in a row's name; the series is empty where the name has no hyphen."""
    task, _, name = row.series.partition("-")
    return task, name


def series_looks(table: Table) -> dict[str, Look]:
    """A colour and a shape for each series, the same in every panel: for the first of a model the model's colour."""
    absent = [colour for model, colour in COLOURS.items() if model not in {row.model for row in table.rows}]
    free = cycle([*(colour for colour in PALETTE if colour not in COLOURS.values()), *absent, *BEYOND_PALETTE])
    looks: dict[str, Look] = {}
    for row in table.rows:
        if (name := parts(row)[1]) not in looks:
            usual = COLOURS.get(row.model, "")
            taken = [look.colour for look in looks.values()]
            looks[name] = Look(usual if usual and usual not in taken else next(free), SHAPES[len(looks) % len(SHAPES)])
    return looks


def share(row: TableRow) -> tuple[float | None, float | None, float | None]:
    """Percent answered or recalled, and the ends of its interval."""
    values = (row.accuracy, row.accuracy_low, row.accuracy_high)
    if row.accuracy is None:
        values = (row.recall, row.recall_low, row.recall_high)
    value, low, high = (None if each is None else 100 * each for each in values)
    return value, low, high


def _points(looks: dict[str, Look], name: str, rows: list[TableRow]) -> list[Point]:
    shift = 2 ** (0.05 * (list(looks).index(name) - (len(looks) - 1) / 2))  # so that error bars stand side by side
    made = []
    for row in sorted(rows, key=lambda row: row.length):
        value, low, high = share(row)
        if value is not None:
            made.append(point(name, row.length * shift, value, (low, high), row.name))
    return made
