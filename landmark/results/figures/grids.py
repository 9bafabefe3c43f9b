"""Panels of a figure in Vega-Lite: heat maps, and maps of a text."""

from collections.abc import Iterable, Mapping, Sequence

from landmark.results.figures.marks import (
    HEIGHT,
    TOOLTIP,
    WIDTH,
    Panel,
    Spec,
    layered,
    once,
    quantity,
    short,
)
from landmark.results.figures.style import DASHED, INK

SIDE = 320  # pixels of a square map
_HEAT = ["#FFFFFF", "#FDD0A2", "#E6550D", "#7F2704"]  # on white, also where the page is dark
_OWN_COLOUR = {"field": "colour", "type": "nominal", "scale": None}


def heat_map(title: str, axes: Sequence[str], cells: Mapping[tuple[str, str], float | None]) -> Panel:
    """A grid of numbers, coloured; dark is high.

    axes: titles of the vertical and of the horizontal axis. cells: a name on each axis to a number, where it is known;
    the names stand upwards and from left to right, numbers by their size.
    """
    rows, columns = (_ordered(dict.fromkeys(names[axis] for names in cells)) for axis in range(2))
    known = [value for value in cells.values() if value is not None]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    made = [
        {
            "y": first,
            "x": second,
            "value": value,
            "text": "missing" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1f}",
            "colour": INK if value is None else "#FFFFFF" if value > middle else "#000000",
            "tooltip": f"{axes[0]} {first}, {f'{axes[1]} {second}'.strip()}\n{short(value)}",
        }
        for first in rows
        for second in columns
        for value in [cells.get((first, second))]
    ]
    scale = {"scheme": "viridis", "reverse": True, "zero": False}
    shade = {"fill": {"field": "value", "type": "quantitative", "scale": scale, "title": None}}
    number = {"text": {"field": "text"}, "color": _OWN_COLOUR}
    layers = [
        {"mark": "rect", "encoding": shade, "transform": [{"filter": "isValid(datum.value)"}]},
        {"mark": {"type": "text", "fontSize": 10}, "encoding": number},
    ]
    place = {"x": _names("x", columns, axes[1]), "y": _names("y", rows[::-1], axes[0]), "tooltip": TOOLTIP}
    return Panel(title, layered(made, layers, WIDTH - 60, HEIGHT) | {"encoding": place})


def square_map(
    title: str,
    values: Sequence[Sequence[float]],
    cell: int,
    length: int,
    titles: tuple[str, str, str],
    *,
    highest: float,
    marked: float,
    note: str = "",
) -> Panel:
    """A map of one text against itself, position by position; dark is high, and cells of 0 are left blank.

    Args:
        title: title of the panel.
        values: for each cell across the values upwards.
        cell: side of a cell in tokens.
        length: tokens of the text.
        titles: of the horizontal axis, the vertical axis and the values.
        highest: the value with the darkest colour.
        marked: a position with dashed lines across and up.
        note: a remark below the title.
    """
    across, up, measured = titles
    made = [
        {"x": x * cell, "x2": (x + 1) * cell, "y": y * cell, "y2": (y + 1) * cell, "value": value}
        | {"tooltip": f"{across} {x * cell:,}, {up} {y * cell:,}\n{measured}: {short(value)}"}
        for x, column in enumerate(values)
        for y, value in enumerate(column)
        if value
    ]
    scale = {"range": _HEAT, "interpolate": "rgb", "domain": [0, highest or 1]}
    legend = {"title": measured, "gradientLength": SIDE / 2}
    axis = {"format": ",d", "tickCount": 5, "grid": False}
    options = {"scale": {"domain": [0, length], "nice": False}, "axis": axis}
    place = {
        "x": quantity("x", {"title": f"{across}, tokens"} | options),
        "x2": {"field": "x2"},
        "y": quantity("y", {"title": f"{up}, tokens"} | options),
        "y2": {"field": "y2"},
        "fill": {"field": "value", "type": "quantitative", "scale": scale, "legend": legend},
        "tooltip": TOOLTIP,
    }
    rule = {"type": "rule", "color": "#888888", "strokeDash": DASHED}
    rules = [once(rule, {way: {"datum": marked, "axis": axis}}) for way in "xy"]
    spec = layered(made, [{"mark": "rect", "encoding": place}, *rules], SIDE, SIDE)
    return Panel(title, spec | {"view": {"fill": _HEAT[0]}}, note=note)


def _ordered(names: Iterable[str]) -> list[str]:
    """Numbers by their size; names that are not all numbers as they come."""
    found = list(names)
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def _names(name: str, values: Sequence[str], title: str) -> Spec:
    """A position that a name decides, in this order."""
    axis = {"labelAngle": 0, "grid": False}
    order = {"scale": {"domain": list(values)}, "sort": None}
    return {"field": name, "type": "nominal", "title": title or None, "axis": axis, **order}
