"""Perplexity by position within the segment, a line for each row."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from landmark.config.schema import POSITION_BIN
from landmark.results.figures.style import colours, keep_in_frame, new_figure
from landmark.results.tables import Table, TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_OCTAVE = 4  # points drawn, at least, for each doubling of the position
FAR, FAR_PERCENT = 1.35, 30.0  # times the median perplexity, or above the first row: out of the picture
LINES = {"transformer": "--", "landmark": "-", "transformer_xl": ":"}
Curve = list[tuple[float, float]]


def draw(table: Table) -> "Figure":
    """A line of panels for the rows of each length (up to a power of two), so that those compared stand together.

    Left: perplexity. Right: its change from the panel's first row, for which the text is the same.
    """
    panels: dict[int, dict[str, tuple[TableRow, Curve]]] = {}
    drawn = curves(table)
    for row in table.rows:
        if row.name in drawn:
            panels.setdefault(1 << (row.length - 1).bit_length(), {})[row.name] = row, drawn[row.name]
    height = sum(max(2.4, 0.6 + 0.19 * len(rows)) for rows in panels.values())
    figure = new_figure(table, 13, 0.8 + height)
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for (_, rows), (left, right) in zip(sorted(panels.items()), axes):
        _absolute(rows, left)
        if len(rows) > 1:
            _relative(rows, right)
        else:
            right.set_axis_off()
            right.legend(*left.get_legend_handles_labels(), fontsize=7, loc="center left")
    for panel in axes[-1]:
        panel.set_xlabel("position within the segment, tokens")
    return figure


def curves(table: Table) -> dict[str, Curve]:
    """(position, perplexity) of each row whose records have it, seeds pooled."""
    found = {}
    for name, records in table.records.items():
        bins = [record["results"].get("position_nll") for record in records]
        if all(bins):
            pooled = [(sum(n for n, _ in same), sum(nll for _, nll in same)) for same in zip(*bins)]
            found[name] = _thinned(pooled)
    return found


def _thinned(bins: Sequence[tuple[float, float]]) -> Curve:
    """Points at the middle of bins that grow with the position, for far ones are many."""
    points, start = [], 0
    while start < len(bins):
        width = max(1, start // PER_OCTAVE)
        stop = start + width if start + 1.5 * width <= len(bins) else len(bins)
        tokens, nll = (sum(each[i] for each in bins[start:stop]) for i in range(2))
        if tokens:
            points.append((POSITION_BIN * (start + stop) / 2, math.exp(nll / tokens)))
        start = stop
    return points


def _absolute(rows: dict[str, tuple[TableRow, Curve]], axes: "Axes") -> None:
    _lines(rows, axes)
    values = {name: [y for _, y in curve] for name, (_, curve) in rows.items()}
    keep_in_frame(axes, values, FAR * statistics.median(y for each in values.values() for y in each))
    lengths = sorted({row.length for row, _ in rows.values()})
    axes.set_title(f"segments of {' and '.join(f'{length:,}' for length in lengths)} tokens", fontsize=9)
    axes.set_ylabel("perplexity")


def _relative(rows: dict[str, tuple[TableRow, Curve]], axes: "Axes") -> None:
    base, first = next((name, dict(curve)) for name, (_, curve) in rows.items())
    changes = {
        name: (row, [(x, 100 * (y / first[x] - 1)) for x, y in curve if x in first])
        for name, (row, curve) in rows.items()
    }
    _lines(changes, axes)
    keep_in_frame(axes, {name: [y for _, y in curve] for name, (_, curve) in changes.items()}, FAR_PERCENT)
    axes.set_title(f"against {base}", fontsize=9)
    axes.set_ylabel("percent")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _lines(rows: dict[str, tuple[TableRow, Curve]], axes: "Axes") -> None:
    for colour, (name, (row, curve)) in zip(colours(len(rows)), rows.items()):
        x, y = [x for x, _ in curve], [y for _, y in curve]
        axes.plot(x, y, LINES.get(row.model, "-"), marker=".", color=colour, linewidth=1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.grid(alpha=0.3)
