"""Accuracy of answers to prompts, or of the probe `recall`, against the length, a line for each series of rows.

Where blocks were kept on disk, below it what that took: memory, and tokens a second.
"""

from landmark.results.columns import TableRow
from landmark.results.figures.marks import Panel, curves, point
from landmark.results.figures.style import DASHED, Look, length_axis, series, series_looks
from landmark.results.figures.tasks import shares
from landmark.results.tables import Table


def panels(table: Table) -> list[list[Panel]]:
    """Percent of the prompts or values, with the interval as bars; for series off the device, peak memory and speed."""
    found = series(table)
    looks = series_looks({name: rows[0].model for name, rows in found.items()})
    points = [each for name, rows in found.items() for each in shares(looks, name, rows)]
    interval = " (95 % interval)" if table.seeds == 1 else ""
    title = "Prompts answered" if any(row.accuracy is not None for row in table.rows) else "Values recalled"
    y = {"title": f"{title.lower()}, percent{interval}", "scale": {"domain": [-4, 104], "nice": False}}
    x = length_axis([row.length for row in table.rows])
    off_device = {name: rows for name, rows in found.items() if all(row.resident_bytes for row in rows)}
    costs = [_costs(name, rows, looks[name].colour) for name, rows in off_device.items()]
    return [[curves(title, points, looks, x, y)], *costs]


def _costs(name: str, rows: list[TableRow], colour: str) -> list[Panel]:
    """The most memory that the process took; tokens a second, with and without the time of searching."""
    x = length_axis([row.length for row in rows])
    memory = [point(name, row.length, (row.resident_bytes or 0.0) / 1e6, told=row.name) for row in rows]
    speed = []
    for row in rows:
        if row.tokens_per_second is not None:
            alone = row.tokens_per_second / (1 - (row.searching or 0.0))
            speed.append(point("all", row.length, row.tokens_per_second, told=row.name))
            speed.append(point("less the search", row.length, alone, told=f"{row.name}, less the search"))
    looks = {"all": Look(colour), "less the search": Look(colour, dash=DASHED, filled=False)}
    zero = {"zero": True}
    y = {"title": "peak memory, MB", "scale": zero}
    return [
        curves(f"Memory of {name}", memory, {name: Look(colour)}, x, y),
        curves(f"Speed of {name}", speed, looks, x, {"title": "tokens a second", "scale": zero}),
    ]
