"""How often a ranking has what was asked for first, and among ten: two points for each row."""

from typing import TYPE_CHECKING

from landmark.results.figures.style import PALETTE, new_figure
from landmark.results.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"recall_at_1": "first", "recall_at_10": "among the first ten"}
SMALLEST = 0.01  # percent, below which the logarithmic axis goes on evenly, to 0


def draw(table: Table) -> "Figure":
    """Percent of the texts, with the interval as bars."""
    figure = new_figure(table, 8, 1.9 + 0.6 * len(table.rows))
    axes = figure.subplots()
    for number, (key, label) in enumerate(LABELS.items()):
        shares = [100 * (getattr(row, key) or 0.0) for row in table.rows]
        bounds = [getattr(row, f"{key}_interval") for row in table.rows]
        ends = [
            (share, share) if interval is None else (100 * interval[0], 100 * interval[1])
            for share, interval in zip(shares, bounds, strict=True)
        ]
        axes.errorbar(
            shares,
            [y + 0.12 * (2 * number - 1) for y in range(len(shares))],
            xerr=[
                [max(0.0, share - low) for share, (low, _) in zip(shares, ends, strict=True)],
                [max(0.0, high - share) for share, (_, high) in zip(shares, ends, strict=True)],
            ],
            fmt="os"[number],
            color=PALETTE[number],
            capsize=3,
            markersize=6,
            label=label,
        )
    axes.set_xscale("symlog", linthresh=SMALLEST)
    axes.set_xlim(left=-0.1 * SMALLEST)
    axes.set_ylim(-0.5, len(table.rows) - 0.5)
    axes.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel("texts whose place was found, percent (95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
