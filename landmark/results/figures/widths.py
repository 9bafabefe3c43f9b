"""Accuracy against the width of the model, a panel for each task; below it against the length, of the widest models.

Rows are named `task-series-w128_length`, with the width after the w.
"""

from dataclasses import replace

from landmark.results.columns import TableRow
from landmark.results.figures import tasks
from landmark.results.figures.marks import Panel, curves, point
from landmark.results.tables import Table


def panels(table: Table) -> list[list[Panel]]:
    """Percent recalled at each task's shortest length against the width; and against the length."""
    narrow = [replace(row, name=_without_width(row)) for row in table.rows]
    looks = tasks.series_looks(replace(table, rows=narrow))
    widths = sorted({row.width for row in table.rows if row.width is not None})
    x = {
        "title": "width of the model",
        "scale": {"type": "log", "base": 2, "domain": [widths[0] / 1.25, widths[-1] * 1.25], "nice": False},
        "axis": {"values": widths},
    }
    y = {"title": "percent (95 % interval)", "scale": {"domain": [-4, 104], "nice": False}}
    found: dict[str, list[TableRow]] = {}
    for row in narrow:
        found.setdefault(tasks.parts(row)[0], []).append(row)
    drawn = []
    for task, rows in found.items():
        shortest = min(row.length for row in rows)
        points = []
        for row in sorted(rows, key=lambda row: row.width or 0):
            value, low, high = tasks.share(row)
            if row.length == shortest and value is not None and row.width is not None:
                points.append(point(tasks.parts(row)[1], row.width, value, (low, high), row.name))
        drawn.append(curves(f"{task}, {shortest} tokens", points, looks, x, y))
    widest = [row for row in narrow if row.width == widths[-1]]
    return [drawn, *tasks.panels(replace(table, rows=widest))]


def _without_width(row: TableRow) -> str:
    """`task-series_length`"""
    return f"{row.series.rpartition('-w')[0] or row.series}_{row.length}"
