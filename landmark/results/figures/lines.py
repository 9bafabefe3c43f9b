"""Perplexity against the evaluation length, a line for each series of rows, and its distance from the first series.

Below it what else the rows measure: losses on copies, and the answers to tasks.
"""

import math
import statistics
from dataclasses import replace

from landmark.results.columns import TableRow
from landmark.results.figures import copying, tasks
from landmark.results.figures.marks import Panel, around, curves, point, reference
from landmark.results.figures.rows import parts, titled
from landmark.results.figures.style import frame, length_axis, series, series_looks
from landmark.results.tables import Table

FAR = 1.25  # perplexities above this many medians leave the picture


def panels(table: Table) -> list[list[Panel]]:
    """Perplexities; losses of rows with the probe `copy`; scores of rows that answer tasks."""
    copies = [row for row in table.rows if row.second_copy is not None]
    answers = [row for row in table.rows if row.accuracy is not None]
    texts = [row for row in table.rows if row.perplexity is not None and row not in [*copies, *answers]]
    return [
        *(_perplexities(part) for part in parts(replace(table, rows=texts))),
        *([[copying.losses(copies)]] if copies else []),
        *(tasks.panels(replace(table, rows=answers)) if answers else []),
    ]


def _perplexities(table: Table) -> list[Panel]:
    """Perplexity; nats a token against the first series at the same length, paired on the same text."""
    found, absolute, relative = series(table), [], []
    looks = series_looks({name: rows[0].model for name, rows in found.items()})
    for number, (name, rows) in enumerate(found.items()):
        shift = 2 ** (0.04 * (number - (len(found) - 1) / 2))  # so that error bars stand side by side
        for row in rows:
            at = row.length * shift
            if row.perplexity is not None:
                absolute.append(point(name, at, row.perplexity, around(row.perplexity, row.spread), row.name))
            if row.difference is not None:
                relative.append(point(name, at, row.difference, around(row.difference, row.difference_error), row.name))
    x = length_axis([row.length for row in table.rows])
    bars = {row.name: around(row.perplexity, row.spread) for row in table.rows if row.perplexity is not None}
    median = statistics.median(row.perplexity for row in table.rows if row.perplexity is not None)
    scale, note = frame(bars, FAR * median)
    spread = "error" if table.seeds == 1 else "deviation over seeds"
    y = {"title": f"perplexity (± standard {spread})", "scale": scale}
    shown = [curves(titled(table), absolute, looks, x, y, note=note)]
    if relative:
        y = {"title": f"nats a token above {next(iter(found))}, paired", "scale": {}}
        threshold = _threshold(table.rows)
        if any(abs(row.difference or 0.0) > threshold for row in table.rows):
            y = y | {
                "scale": {"type": "symlog", "constant": threshold},
                "axis": {"values": _ticks(threshold), "format": ".3~r"},
            }
        shown.append(curves("Difference at the same length", relative, looks, x, y, below=[reference(y=0)]))
    return shown


def _threshold(rows: list[TableRow]) -> float:
    """Differences below it are drawn to scale, those above by their logarithm: the power of ten of the errors."""
    errors = sorted(row.difference_error for row in rows if row.difference_error)
    return 10.0 ** math.ceil(math.log10(errors[len(errors) // 2])) if errors else 0.01


def _ticks(threshold: float) -> list[float]:
    """0 and powers of ten either way."""
    sizes = [threshold * 10**power for power in range(8)]
    return [*(-size for size in sizes[::-1]), 0, *sizes]
