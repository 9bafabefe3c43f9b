"""Accuracy against the width of the model, a panel for each task; below it against the length, of the widest models.

Rows are named `task-series-w128_length`, with the width after the w.
"""

from dataclasses import replace

from landmark.results.columns import TableRow
from landmark.results.figures import tasks
from landmark.results.figures.marks import Panel, curves, point
from landmark.results.figures.style import percent, series_looks
from landmark.results.tables import Table


def panels(table: Table) -> list[list[Panel]]:
    """Percent recalled at each task's shortest length against the width; and against the length."""
    found = [(_width(row), replace(row, name=_without_width(row))) for row in table.rows]
    widths = sorted({width for width, _ in found})
    looks = series_looks(tasks.models(row for _, row in found))
    x = {
        "title": "width of the model",
        "scale": {"type": "log", "base": 2, "domain": [widths[0] / 1.25, widths[-1] * 1.25], "nice": False},
        "axis": {"values": widths},
    }
    y = {"title": "percent (95 % interval)", "scale": {"domain": [-4, 104], "nice": False}}
    drawn = []
    for task in dict.fromkeys(tasks.parts(row)[0] for _, row in found):
        of_task = [(width, row) for width, row in found if tasks.parts(row)[0] == task]
        shortest = min(row.length for _, row in of_task)
        points = []
        for width, row in sorted(of_task, key=lambda each: each[0]):
            value, low, high = percent(row)
            if row.length == shortest and value is not None:
                points.append(point(tasks.parts(row)[1], width, value, (low, high), f"{row.name}, width {width}"))
        drawn.append(curves(f"{task}, {shortest} tokens", points, looks, x, y))
    widest = [row for width, row in found if width == widths[-1]]
    return [drawn, *tasks.panels(replace(table, rows=widest))]


def _width(row: TableRow) -> int:
    return int(row.series.rpartition("-w")[2])


def _without_width(row: TableRow) -> str:
    """`task-series_length`"""
    return f"{row.series.rpartition('-w')[0]}_{row.length}"
