"""The picture of a table: perplexities with their errors, and how the rows compare, here and in the paper."""

import io
import math
from typing import TYPE_CHECKING

from landmark.lab.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"transformer": "#0072B2", "landmark": "#D55E00", "transformer_xl": "#009E73"}
PAPER = "#333333"


def draw(table: Table) -> bytes:
    """A PNG. Left: perplexity of each row. Right: its distance from the first row, beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 1.9 + 0.34 * len(table.rows)
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(11, height), layout="constrained")
    try:
        _absolute(table, left)
        _relative(table, right)
        figure.suptitle(table.header, fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    finally:
        pyplot.close(figure)
    return buffer.getvalue()


def _absolute(table: Table, axes: "Axes") -> None:
    for model, colour in COLOURS.items():
        rows = [(y, row) for y, row in enumerate(table.rows) if row.model == model]
        if rows:
            axes.errorbar(
                [row.perplexity for _, row in rows],
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
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _relative(table: Table, axes: "Axes") -> None:
    """Changes of perplexity in percent; ours with the standard error of the paired difference."""
    base = table.rows[0]
    for y, row in enumerate(table.rows):
        change = _percent(row.perplexity, base.perplexity)
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
    axes.set_xlabel(f"perplexity against {base.name}, percent (± paired standard error)")
    axes.grid(alpha=0.3)
    if table.published:
        axes.legend(fontsize=8)


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1)
