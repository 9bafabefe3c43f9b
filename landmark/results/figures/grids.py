"""Panels of a figure in Vega-Lite: heat maps, maps of a text, quartile boxes and bars."""

import statistics
from collections.abc import Mapping, Sequence

from landmark.results.figures.marks import (
    HEIGHT,
    LABEL,
    LINE,
    TOOLTIP,
    WIDTH,
    Panel,
    Spec,
    layered,
    once,
    quantity,
    reference,
    short,
)
from landmark.results.figures.style import DASHED, INK

SIDE = 320  # pixels of a square map
_HEAT = ["#FFFFFF", "#FDD0A2", "#E6550D", "#7F2704"]  # on white, also where the page is dark
_OWN_COLOUR = {"field": "colour", "type": "nominal", "scale": None}


def heat_map(title: str, axes: Sequence[str], cells: Mapping[tuple[str, str], float | None]) -> Panel:
    """A grid of numbers, coloured; dark is high.

    axes: titles of the vertical and of the horizontal axis. cells: a name on each axis to a number, where it is known;
    the names stand upwards and from left to right.
    """
    rows, columns = (list(dict.fromkeys(names[axis] for names in cells)) for axis in range(2))
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


def boxes(title: str, samples: Sequence[Sequence[int]], colour: str, x: str, y: str, *, level: float) -> Panel:
    """Quartiles (box), median (line), extremes (whiskers) and mean (diamond) of samples side by side.

    Args:
        title: title of the panel.
        samples: numbers of each box.
        colour: colour of the boxes.
        x: title of the horizontal axis, on which the boxes are numbered.
        y: title of the vertical axis, which begins at 0.
        level: value of a dashed line, a little below the top.
    """
    made = []
    for number, values in enumerate(samples):
        low, middle, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        mean = statistics.fmean(values)
        told = f"{title}, {number}\nmedian {middle:g}, quartiles {low:g} and {high:g}, "
        told += f"extremes {min(values)} and {max(values)}, mean {mean:.4g}"
        made.append({"number": str(number), "least": min(values), "low": low, "middle": middle, "high": high})
        made[-1] |= {"most": max(values), "mean": mean, "tooltip": told}
    rule, tick = {"type": "rule", "color": INK}, {"type": "tick", "color": INK}
    box = {"type": "bar", "size": 24, "fill": colour, "fillOpacity": 0.6, "stroke": INK, "strokeWidth": 0.8}
    diamond = {"type": "point", "shape": "diamond", "size": 45, "fill": "white", "stroke": INK, "opacity": 1}
    end, median = tick | {"thickness": 1, "size": 12}, tick | {"thickness": 1.5, "size": 24}
    shown = (
        (rule, {"y": "least", "y2": "low"}),
        (rule, {"y": "high", "y2": "most"}),
        (end, {"y": "least"}),
        (end, {"y": "most"}),
        (box, {"y": "low", "y2": "high"}),
        (median, {"y": "middle"}),
        (diamond, {"y": "mean"}),
    )
    layers = [
        {"mark": mark, "encoding": {channel: {"field": value} for channel, value in at.items()}} for mark, at in shown
    ]
    place = {
        "x": _names("number", [each["number"] for each in made], x),
        "y": quantity("mean", {"title": y, "scale": {"domain": [0, 1.06 * level], "nice": False}}),
        "tooltip": TOOLTIP,
    }
    layers = [reference(y=level), {"layer": layers, "encoding": place}]
    return Panel(title, layered(made, layers, max(260, 34 * len(made)), HEIGHT))


def bar_chart(title: str, values: Mapping[str, float], colours: Sequence[str], x: str, *, level: float) -> Panel:
    """Horizontal bars with their values.

    Args:
        title: title of the panel.
        values: lengths of the bars by their names.
        colours: a colour for each bar.
        x: title of the horizontal axis, which begins at 0.
        level: value of a dashed line, near the end of the axis.
    """
    made = [
        {"name": name, "value": value, "colour": colour, "tooltip": f"{name}\n{value:.3g}"}
        for (name, value), colour in zip(values.items(), colours, strict=True)
    ]
    axis = {"title": x, "scale": {"domain": [0, 1.12 * max(level, *values.values())], "nice": False}}
    place = {"x": quantity("value", axis), "y": _names("name", list(values), ""), "tooltip": TOOLTIP}
    number = {"mark": LABEL | {"align": "left", "dx": 4}, "encoding": {"text": {"field": "value", "format": ".3~g"}}}
    layers = [{"mark": {"type": "bar", "fillOpacity": 0.75}, "encoding": {"color": _OWN_COLOUR}}, number]
    spec = layered(
        made, [{"layer": layers, "encoding": place}, reference(x=level)], WIDTH, max(2, len(made)) * 2 * LINE
    )
    return Panel(title, spec)


def _names(name: str, values: Sequence[str], title: str) -> Spec:
    """A position that a name decides, in this order."""
    axis = {"labelAngle": 0, "grid": False}
    order = {"scale": {"domain": list(values)}, "sort": None}
    return {"field": name, "type": "nominal", "title": title or None, "axis": axis, **order}
