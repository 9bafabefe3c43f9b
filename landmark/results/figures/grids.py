"""Panels of a figure in Vega-Lite: heat maps, quartile boxes and bars."""

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
    quantity,
    reference,
    short,
)
from landmark.results.figures.style import INK

Cells = Sequence[Sequence[float | None]]
_OWN_COLOUR = {"field": "colour", "type": "nominal", "scale": None}


def heat_map(title: str, axes: Sequence[str], values: Sequence[Sequence[str]], cells: Cells) -> Panel:
    """A grid of numbers, coloured; dark is high.

    Args:
        title: title of the panel.
        axes: titles of the vertical and of the horizontal axis.
        values: names on each axis, upwards and from left to right.
        cells: a list for each name of the vertical axis; None where a number is missing.
    """
    known = [value for line in cells for value in line if value is not None]
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
        for first, line in zip(values[0], cells, strict=True)
        for second, value in zip(values[1], line, strict=True)
    ]
    scale = {"scheme": "viridis", "reverse": True, "zero": False}
    shade = {"fill": {"field": "value", "type": "quantitative", "scale": scale, "title": None}}
    number = {"text": {"field": "text"}, "color": _OWN_COLOUR}
    layers = [
        {"mark": "rect", "encoding": shade, "transform": [{"filter": "isValid(datum.value)"}]},
        {"mark": {"type": "text", "fontSize": 10}, "encoding": number},
    ]
    place = {"x": _names("x", values[1], axes[1]), "y": _names("y", values[0][::-1], axes[0]), "tooltip": TOOLTIP}
    return Panel(title, layered(made, layers, WIDTH - 60, HEIGHT) | {"encoding": place})


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
    scale = {"title": y, "scale": {"domain": [0, 1.06 * level], "nice": False}}

    def between(mark: Spec, low: str, high: str) -> Spec:
        return {"mark": mark, "encoding": {"y": quantity(low, scale), "y2": {"field": high}}}

    def at(mark: Spec, value: str) -> Spec:
        return {"mark": mark, "encoding": {"y": quantity(value, scale)}}

    rule, tick = {"type": "rule", "color": INK}, {"type": "tick", "color": INK}
    box = {"type": "bar", "size": 24, "fill": colour, "fillOpacity": 0.6, "stroke": INK, "strokeWidth": 0.8}
    diamond = {"type": "point", "shape": "diamond", "size": 45, "fill": "white", "stroke": INK, "opacity": 1}
    whiskers = [between(rule, "least", "low"), between(rule, "high", "most")]
    ends = [at(tick | {"thickness": 1, "size": 12}, end) for end in ("least", "most")]
    median = at(tick | {"thickness": 1.5, "size": 24}, "middle")
    place = {"x": _names("number", [each["number"] for each in made], x), "tooltip": TOOLTIP}
    layers = [*whiskers, *ends, between(box, "low", "high"), median, at(diamond, "mean")]
    spec = layered(made, [reference(y=level), {"layer": layers, "encoding": place}], max(260, 34 * len(made)), HEIGHT)
    return Panel(title, spec)


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
