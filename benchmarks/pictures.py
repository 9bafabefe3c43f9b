"""A picture against the length of the context: time of a chunk and memory kept."""

from collections.abc import Sequence

from benchmarks import growth
from benchmarks.report import Row
from landmark.experiment.results.charts import COLOURS, CROSS, DASHED, DOTTED, Look, Panel, curves, png, point

PLAIN, LANDMARK, XL, PER_HEAD = *COLOURS.values(), "#CC79A7"
LOOKS = {
    growth.PLAIN: Look(PLAIN, "square", filled=False),
    growth.LANDMARK: Look(LANDMARK),
    growth.NO_SCAN: Look(LANDMARK, dash=DOTTED),
    growth.PER_HEAD: Look(PER_HEAD, "triangle-up"),
    growth.RECENT: Look(XL, "diamond"),
    growth.SCATTERED: Look(LANDMARK, CROSS, DASHED),
    growth.PREFIX: Look(PLAIN, "square", filled=False),
    growth.BLOCKS: Look(LANDMARK),
}


def draw(rows: Sequence[Row], title: str) -> bytes:
    """A PNG. Left: time of a chunk. Right: memory kept. All axes are logarithmic."""
    times, kept = ([row for row in rows if row.unit == unit] for unit in ("ms", "MB"))
    return png(title, [[_panel("Time of a chunk", times, "ms"), _panel("Keys and values kept", kept, "MB")]])


def _panel(title: str, rows: Sequence[Row], unit: str) -> Panel:
    looks = {name: look for name, look in LOOKS.items() if any(row.measured == name for row in rows)}
    points = [
        point(row.measured, row.context or 0, row.value.median, (row.value.low, row.value.high))
        for row in sorted(rows, key=lambda row: row.context or 0)
        if row.measured in looks
    ]
    contexts = sorted({row.context or 0 for row in rows})
    short_number = "datum.value >= 1e6 ? datum.value / 1e6 + 'M' : datum.value / 1e3 + 'K'"
    x = {
        "title": "context before the chunk, tokens",
        "scale": {"type": "log"},
        "axis": {"values": contexts, "labelExpr": short_number},
    }
    ticks = [digit * 10**power for power in range(-6, 9) for digit in (1, 2, 5)]
    axis = {"values": ticks, "format": "~r", "labelOverlap": True}
    y = {"title": unit, "scale": {"type": "log"}, "axis": axis}
    return curves(title, points, looks, x, y)
