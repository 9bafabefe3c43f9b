"""Accuracy of answers to prompts against their length, a line for each series of rows."""

import math
from typing import TYPE_CHECKING

from landmark.lab.plots.style import MARKERS, length_axis, new_figure, series, series_colours
from landmark.lab.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(table: Table) -> "Figure":
    """Percent of the prompts, with the interval as bars."""
    figure = new_figure(table, 8, 4.4)
    axes, found = figure.subplots(), series(table)
    colours = series_colours(found)
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
    length_axis(axes, table)
    axes.set_ylim(-4, 104)
    axes.set_ylabel("prompts answered, percent (95 % interval)" if table.seeds == 1 else "prompts answered, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value
