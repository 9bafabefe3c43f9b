"""How often a ranking has what was asked for first, and among ten: a bar for each row."""

from typing import TYPE_CHECKING

from landmark.lab.plots.style import PALETTE, new_figure
from landmark.lab.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(table: Table) -> "Figure":
    """Percent of the texts on a logarithmic axis, with the interval as bars."""
    figure = new_figure(table, 8, 1.9 + 0.6 * len(table.rows))
    axes = figure.subplots()
    for number, key in enumerate(("recall_at_1", "recall_at_10")):
        for y, row in enumerate(table.rows):
            share, interval = getattr(row, key), getattr(row, f"{key}_interval")
            if not share:
                continue
            low, high = interval or (share, share)
            axes.errorbar(
                100 * share,
                y + 0.12 * (2 * number - 1),
                xerr=[[100 * max(0.0, share - low)], [100 * max(0.0, high - share)]],
                fmt="os"[number],
                color=PALETTE[number],
                capsize=3,
                markersize=6,
                label=("first", "among the first ten")[number] if y == 0 else None,
            )
    axes.set_xscale("log")
    axes.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel("texts whose place was found, percent (95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="best")
    return figure
