"""Perplexity against the evaluation length, a line for each reader, and how far each is from the first of them."""

import math
import statistics
from typing import TYPE_CHECKING

from landmark.results.figures.style import MARKERS, keep_in_frame, length_axis, new_figure, series, series_colours
from landmark.results.tables import Table, TableRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 1.25  # times the median perplexity, and a row is out of the picture


def draw(table: Table) -> "Figure":
    """Left: perplexity. Right: nats a token against the first series at the same length, paired on the same text."""
    figure = new_figure(table, 11, 4.6)
    (left, right), found = figure.subplots(1, 2), series(table)
    colours = series_colours(found)
    for number, (name, rows) in enumerate(found.items()):
        look = {
            "marker": MARKERS[number % len(MARKERS)],
            "color": colours[name],
            "markersize": 5,
            "capsize": 3,
        }
        shift = 2 ** (0.04 * (number - (len(found) - 1) / 2))  # so that bars stand side by side
        x = [row.length * shift for row in rows]
        left.errorbar(
            x, [row.perplexity or math.nan for row in rows], [row.spread or 0.0 for row in rows], label=name, **look
        )
        compared = [(at, row) for at, row in zip(x, rows) if row.difference is not None]
        right.errorbar(
            [at for at, _ in compared],
            [row.difference for _, row in compared],
            [row.difference_error or 0.0 for _, row in compared],
            **look,
        )
    measured = {row.name: (row.perplexity, row.spread or 0.0) for row in table.rows if row.perplexity is not None}
    bars = {name: [value - spread, value + spread] for name, (value, spread) in measured.items()}
    keep_in_frame(left, bars, FAR * statistics.median(value for value, _ in measured.values()))
    left.set_ylabel(f"perplexity (± standard {'error' if table.seeds == 1 else 'deviation over seeds'})")
    threshold = _threshold(table.rows)
    if any(abs(row.difference or 0.0) > threshold for row in table.rows):
        right.set_yscale("symlog", linthresh=threshold)
    right.axhline(0, color=next(iter(colours.values())), linewidth=1.2)
    right.set_ylabel(f"nats a token above {next(iter(found))}, paired")
    for panel in (left, right):
        length_axis(panel, [row.length for row in table.rows])
        panel.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def _threshold(rows: list[TableRow]) -> float:
    """Differences below it are drawn to scale, those above by their logarithm: the power of ten of the errors."""
    errors = sorted(row.difference_error for row in rows if row.difference_error)
    return 10.0 ** math.ceil(math.log10(errors[len(errors) // 2])) if errors else 0.01
