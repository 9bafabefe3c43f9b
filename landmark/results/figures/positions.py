"""Perplexity by position within the segment, a line for each row."""

import math
import statistics
from collections.abc import Sequence

from landmark.config.schema import POSITION_BIN
from landmark.results.columns import TableRow
from landmark.results.figures.marks import Panel, point
from landmark.results.figures.marks import curves as draw_curves
from landmark.results.figures.style import DASHED, DOTTED, SOLID, Look, colours, frame
from landmark.results.tables import Table

PER_OCTAVE = 4  # points drawn, at least, for each doubling of the position
FAR, FAR_PERCENT = 1.35, 30.0  # perplexities above this many medians, and changes above it, leave the picture
DASHES = {"transformer": DASHED, "landmark": SOLID, "transformer_xl": DOTTED}
Curve = list[tuple[float, float]]


def panels(table: Table) -> list[list[Panel]]:
    """Panels for the rows of each length (up to a power of two), so that those compared stand together: perplexity,
    and its change from the first of these rows, for which the text is the same.
    """
    groups: dict[int, list[TableRow]] = {}
    drawn = curves(table)
    for row in table.rows:
        if row.name in drawn:
            groups.setdefault(1 << (row.length - 1).bit_length(), []).append(row)
    made = []
    for _, rows in sorted(groups.items()):
        found = {row.name: drawn[row.name] for row in rows}
        looks = {
            row.name: Look(colour, dash=DASHES.get(row.model, SOLID))
            for row, colour in zip(rows, colours(len(rows)), strict=True)
        }
        lengths = " and ".join(f"{length:,}" for length in sorted({row.length for row in rows}))
        far = FAR * statistics.median(y for curve in found.values() for _, y in curve)
        made.append([_panel(f"Segments of {lengths} tokens", "perplexity", found, looks, far)])
        if len(rows) > 1:
            base, first = rows[0].name, dict(found[rows[0].name])
            changes = {
                name: [(x, 100 * (y / first[x] - 1)) for x, y in curve if x in first] for name, curve in found.items()
            }
            made[-1].append(_panel(f"{lengths} tokens, against {base}", "percent", changes, looks, FAR_PERCENT))
    return made


def _panel(title: str, y: str, found: dict[str, Curve], looks: dict[str, Look], far: float) -> Panel:
    """far: values above it leave the picture."""
    scale, note = frame({name: [value for _, value in curve] for name, curve in found.items()}, far)
    ticks = [1 << power for power in range(5, 40)]
    points = [point(name, at, value) for name, curve in found.items() for at, value in curve]
    x = {
        "title": "position within the segment, tokens",
        "scale": {"type": "log", "base": 2},
        "axis": {"format": ",.0f", "values": ticks},
    }
    return draw_curves(title, points, looks, x, {"title": y, "scale": scale}, marks="small", note=note)


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
    """Points at the middle of bins, which grow with the position: most bins are far."""
    points, start = [], 0
    while start < len(bins):
        width = max(1, start // PER_OCTAVE)
        stop = start + width if start + 1.5 * width <= len(bins) else len(bins)
        tokens, nll = (sum(each[i] for each in bins[start:stop]) for i in range(2))
        if tokens:
            points.append((POSITION_BIN * (start + stop) / 2, math.exp(nll / tokens)))
        start = stop
    return points
