"""Colours, markers and axes that all figures share. Loads no drawing library."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from landmark.results.columns import TableRow
from landmark.results.tables import Table

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"transformer": "#0072B2", "landmark": "#D55E00", "transformer_xl": "#009E73"}
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#999999")
BEYOND_PALETTE = ("#8C564B", "#7A4FBF", "#8A9A00")  # where a figure needs more
INK = "#333333"  # of the paper's numbers and of reference lines
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
CROSS = "M-.7,-.7L.7,.7M-.7,.7L.7,-.7"
SOLID, DASHED, DOTTED = (1, 0), (6, 3), (2, 2)
# Anchors of a rainbow, for more series than the palette has colours, and of a scale for ordered series (plasma).
_RAINBOW = ("#3F3994", "#4777EF", "#1FC9DD", "#4DF884", "#B6F735", "#F3C63A", "#FA7D20", "#D23105", "#900C00")
_ORDERED = ("#0D0887", "#5402A3", "#8B0AA5", "#B93289", "#DB5C68", "#F48849", "#FEBC2A")


class Look(NamedTuple):
    """How a series is drawn: its colour, the shape of its points, the dashes of its line, whether points are filled."""

    colour: str
    shape: str = "circle"
    dash: tuple[int, int] = SOLID
    filled: bool = True

    @property
    def fill(self) -> str:
        """The colour inside a point."""
        return self.colour if self.filled else "transparent"


def series(table: Table) -> dict[str, list[TableRow]]:
    """Rows that differ in their length, by the name that they share, shortest first."""
    found: dict[str, list[TableRow]] = {}
    for row in table.rows:
        found.setdefault(row.series, []).append(row)
    return {name: sorted(rows, key=lambda row: row.length) for name, rows in found.items()}


def series_looks(models: Mapping[str, str]) -> dict[str, Look]:
    """A colour and a shape for each series: for the first of a model the model's colour, for the rest others.

    models: of each series, in the order in which they are named.
    """
    absent = [colour for model, colour in COLOURS.items() if model not in models.values()]
    free = cycle([*(colour for colour in PALETTE if colour not in COLOURS.values()), *absent, *BEYOND_PALETTE])
    looks: dict[str, Look] = {}
    for (name, model), shape in zip(models.items(), cycle(SHAPES)):
        usual = COLOURS.get(model)
        is_free = usual is not None and all(look.colour != usual for look in looks.values())
        looks[name] = Look(usual if usual and is_free else next(free), shape)
    return looks


def percent(row: TableRow) -> tuple[float | None, float | None, float | None]:
    """Percent of prompts answered or, where there were none, of values recalled, and the ends of its interval."""
    values = (row.accuracy, row.accuracy_low, row.accuracy_high)
    if row.accuracy is None:
        values = (row.recall, row.recall_low, row.recall_high)
    value, low, high = (None if each is None else 100 * each for each in values)
    return value, low, high


def colours(count: int) -> list[str]:
    """So many colours: the palette, or where it has too few a rainbow."""
    return list(PALETTE[:count]) if count <= len(PALETTE) else _between(_RAINBOW, count)


def ordered_colours(count: int) -> list[str]:
    """Colours from dark to bright for series that have an order."""
    return _between(_ORDERED, count)


def length_axis(lengths: Sequence[int]) -> dict[str, Any]:
    """Options of an axis of evaluation lengths, doubling; where some are long, they are written as 8K, 128K and 1M."""
    short = "datum.value % 1048576 ? datum.value / 1024 + 'K' : datum.value / 1048576 + 'M'"
    shortened = "datum.value % 1024 == 0" if max(lengths) >= 65536 else "false"
    label = f"{shortened} ? {short} : format(datum.value, ',')"
    low, high = min(lengths), max(lengths)
    return {
        "title": "evaluation length, tokens",
        "scale": {"type": "log", "base": 2, "domain": [low / 1.25, high * 1.25], "nice": False},
        "axis": {"values": sorted(set(lengths)), "labelExpr": label, "labelOverlap": "greedy"},
    }


def frame(values: Mapping[str, Sequence[float]], highest: float) -> tuple[dict[str, Any], str]:
    """The scale of an axis without the values above `highest`, and a note that names their series.

    values: of each series, with the ends of its error bars. Both are empty where all values fit.
    """
    above = [name for name, each in values.items() if any(value > highest for value in each)]
    inside = [value for each in values.values() for value in each if value <= highest]
    if not above or not inside:
        return {}, ""
    low, high = min(inside), max(inside)
    room = 0.06 * (high - low)
    return {"domain": [low - room, high + room]}, f"above: {', '.join(above)}"


def _between(anchors: Sequence[str], count: int) -> list[str]:
    """Colours evenly spaced along a path of anchors."""
    found = []
    for number in range(count):
        at = number / max(1, count - 1) * (len(anchors) - 1)
        start = min(int(at), len(anchors) - 2)
        parts = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in anchors[start : start + 2]]
        found.append("#" + "".join(f"{round(a + (at - start) * (b - a)):02X}" for a, b in zip(*parts, strict=True)))
    return found
