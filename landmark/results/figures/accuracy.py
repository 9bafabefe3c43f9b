"""Accuracy of answers to prompts against their length, a line for each series of rows.

Where blocks were kept on disk, below it what that took: memory, and tokens a second.
"""

import math
from typing import TYPE_CHECKING

from landmark.results.figures.style import MARKERS, length_axis, new_figure, series, series_colours
from landmark.results.tables import Table, TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(table: Table) -> "Figure":
    """Percent of the prompts, with the interval as bars; below, for series off the device, peak memory and speed."""
    found = series(table)
    colours = series_colours(found)
    off_device = {name: rows for name, rows in found.items() if all(row.resident_bytes for row in rows)}
    figure = new_figure(table, 9, 7.6 if off_device else 4.4)
    if off_device:
        above, below = figure.subfigures(2, 1, height_ratios=(4.4, 3.2), squeeze=False)[:, 0]
        axes = above.subplots()
        memory, speed = below.subplots(1, 2)
        for name, rows in off_device.items():
            _costs(rows, memory, speed, colours[name])
    else:
        axes = figure.subplots()
    for number, (name, rows) in enumerate(found.items()):
        value = [_percent(row.accuracy) for row in rows]
        low, high = [_percent(row.accuracy_low) for row in rows], [_percent(row.accuracy_high) for row in rows]
        shift = 2 ** (0.05 * (number - (len(found) - 1) / 2))  # so that bars of equal length stand side by side
        axes.errorbar(
            [row.length * shift for row in rows],
            value,
            yerr=[
                [max(0.0, v - bound) for v, bound in zip(value, low)],
                [max(0.0, bound - v) for v, bound in zip(value, high)],
            ],
            marker=MARKERS[number % len(MARKERS)],
            color=colours[name],
            capsize=3,
            markersize=5,
            label=name,
        )
    length_axis(axes, [row.length for row in table.rows])
    axes.set_ylim(-4, 104)
    axes.set_ylabel("prompts answered, percent (95 % interval)" if table.seeds == 1 else "prompts answered, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _costs(rows: list[TableRow], memory: "Axes", speed: "Axes", colour: str) -> None:
    """Left: the most memory that the process took. Right: tokens a second, and less the time of searching."""
    lengths = [row.length for row in rows]
    memory.plot(lengths, [(row.resident_bytes or 0.0) / 1e6 for row in rows], marker="o", color=colour)
    memory.set_ylim(0)
    memory.set_ylabel(f"peak memory of {rows[0].series}, MB")
    tokens = [row.tokens_per_second or math.nan for row in rows]
    alone = [value / (1 - (row.searching or 0.0)) for value, row in zip(tokens, rows)]
    speed.plot(lengths, tokens, marker="o", color=colour, label="all")
    speed.plot(
        lengths, alone, marker="o", linestyle="--", markerfacecolor="none", color=colour, label="less the search"
    )
    speed.set_ylim(0)
    speed.set_ylabel("tokens a second")
    speed.legend(fontsize=8)
    for axes in (memory, speed):
        length_axis(axes, lengths)
        axes.grid(alpha=0.3)


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value
