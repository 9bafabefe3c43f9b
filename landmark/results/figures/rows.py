"""Perplexities of rows with their errors, and how the rows compare, here and in the paper."""

import math
from typing import TYPE_CHECKING, Any

from landmark.results.figures.style import COLOURS, PAPER, new_figure
from landmark.results.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3, "fontsize": 8}


def draw(table: Table) -> "Figure":
    """Left: perplexity of each row. Right: its distance from the first row, beside the paper's."""
    figure = new_figure(table, 11, 1.9 + 0.34 * len(table.rows))
    left, right = figure.subplots(1, 2, sharey=True)
    _absolute(table, left)
    _relative(table, right)
    return figure


def _absolute(table: Table, axes: "Axes") -> None:
    for model, colour in COLOURS.items():
        rows = [(y, row) for y, row in enumerate(table.rows) if row.model == model]
        if rows:
            axes.errorbar(
                [row.perplexity or math.nan for _, row in rows],
                [y for y, _ in rows],
                xerr=[row.spread or 0.0 for _, row in rows],
                fmt="o",
                color=colour,
                capsize=3,
                markersize=5,
                label=model.replace("_", "-"),
            )
    axes.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel("perplexity, measured here (lower is better)")
    axes.grid(alpha=0.3)
    axes.legend(**ABOVE)


def _relative(table: Table, axes: "Axes") -> None:
    """Changes of perplexity in percent; ours with the standard error of the paired difference."""
    base = table.rows[0]
    for y, row in enumerate(table.rows):
        change = _percent(row.perplexity or math.nan, base.perplexity or math.nan)
        nats, error = row.difference, row.difference_error
        axes.errorbar(
            change if nats is None else 100 * math.expm1(nats),
            y,
            xerr=0.0 if nats is None or error is None else 100 * math.exp(nats) * error,
            fmt="o",
            color=COLOURS.get(row.model, "black"),
            capsize=3,
            markersize=5,
            label="measured here" if y == 0 else None,
        )
    for label, marker in (("paper", "s"), ("poster", "x")):
        first = getattr(base, label)
        rows = [(y, value) for y, row in enumerate(table.rows) if (value := getattr(row, label)) is not None]
        if first is not None and rows:
            axes.plot(
                [_percent(value, first) for _, value in rows],
                [y for y, _ in rows],
                marker,
                color=PAPER,
                markerfacecolor="none",
                markersize=8 if marker == "s" else 6,
                label=label,
            )
    axes.axvline(0, color="black", linewidth=0.8, alpha=0.5)
    axes.set_xlabel(f"perplexity against {base.name},\npercent (± paired standard error)")
    axes.grid(alpha=0.3)
    if table.published:
        axes.legend(**ABOVE)


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1)
