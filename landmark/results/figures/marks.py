"""Panels of a figure in Vega-Lite, made from points that are plain values: curves, and dots beside names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from landmark.results.figures.style import DASHED, INK, SOLID, Look

Spec = dict[str, Any]
Point = dict[str, Any]
Interval = tuple[float | None, float | None]
WIDTH, HEIGHT, LINE = 400, 270, 22  # pixels: of a panel, and the height of a line of dots
LABEL = {"type": "text", "fontSize": 10, "color": INK}
TOOLTIP = {"field": "tooltip", "type": "nominal"}
MEASURED, HAS_BAR = "isValid(datum.tooltip)", "datum.low < datum.high"


@dataclass(frozen=True)
class Panel:
    """A part of a figure: a Vega-Lite specification without its title.

    looks: its series, where there are several. note: a remark that stands below the title.
    """

    title: str
    spec: Spec
    looks: Mapping[str, Look] = field(default_factory=dict)
    note: str = ""

    def fading(self) -> Spec:
        """The specification, in which a click on the legend fades the other series; for a panel with its own legend."""
        if len(self.looks) < 2:
            return self.spec
        chosen = {"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
        faded = {"condition": {"param": "chosen", "value": 1}, "value": 0.12}
        layers = [
            each | {"encoding": each["encoding"] | {"opacity": faded}} if "stroke" in each["encoding"] else each
            for each in self.spec["layer"]
        ]
        of_series = next(number for number, each in enumerate(layers) if "stroke" in each["encoding"])
        layers[of_series] = layers[of_series] | {"params": [chosen]}
        return self.spec | {"layer": layers}


def point(series: str, x: float, y: float, interval: Interval = (None, None), told: str = "") -> Point:
    """A point of a curve.

    Args:
        series: name of the curve, for the legend.
        x: position across.
        y: the measurement.
        interval: ends of its error bar; None where there is none.
        told: first line of the tooltip; by default the curve and the position.
    """
    return {"series": series, "x": x, **_measured("y", y, interval, told or f"{series}, {short(x)}")}


def dot(series: str, name: str, x: float, interval: Interval = (None, None)) -> Point:
    """A measurement beside a name.

    Args:
        series: name of the series, for the legend.
        name: the line in which the dot stands.
        x: the measurement.
        interval: ends of its error bar; None where there is none.
    """
    return {"series": series, "name": name, **_measured("x", x, interval, f"{name}, {series}")}


def around(value: float, error: float | None) -> tuple[float, float]:
    """Ends of the error bar of a value."""
    return value - (error or 0.0), value + (error or 0.0)


def short(value: float | None) -> str:
    """A number in few digits, as tooltips show it."""
    if value is None:
        return "missing"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def curves(
    title: str,
    points: Sequence[Point],
    looks: Mapping[str, Look],
    x: dict[str, Any],
    y: dict[str, Any],
    *,
    joined: Iterable[str] | None = None,
    dots: bool = True,
    step: bool = False,
    quiet: bool = False,
    legend: str | None = None,
    levels: Mapping[str, float] | None = None,
    diagonal: tuple[float, float] | None = None,
    note: str = "",
) -> Panel:
    """Curves over an axis of numbers.

    Args:
        title: title of the panel.
        points: as `point` makes them, those of a curve in order; a "label" is written beside its point.
        looks: series to its look, in the order of the legend.
        x: options of the horizontal axis: title, scale, axis.
        y: options of the vertical axis.
        joined: series whose points a line joins; by default all.
        dots: whether points are marked.
        step: whether a value holds until the next point.
        quiet: whether the small points of a curve without dots are seen only by the pointer.
        legend: title of the legend.
        levels: names to values: dashed lines across the panel. Without a name the line is not labelled.
        diagonal: where a dashed line begins and ends on which both axes have the same value; by default none.
        note: a remark below the title, as "above: random_2048".
    """
    x, y = _roomy(x), _roomy(y)
    shown = _legend(looks, title=legend, **({} if dots else {"symbolType": "stroke", "symbolSize": 400}))
    place = {"x": quantity("x", x), "y": quantity("y", y), "stroke": _by_series(looks, "colour", shown)}
    layers = _levels(levels or {}, y)
    if "domain" in y["scale"]:
        points = _cut(points, y["scale"]["domain"][-1], geometric=x["scale"].get("type") == "log")
    if diagonal:
        both = {"x": quantity("end", x), "y": quantity("end", y)}
        layers.append(layer({"type": "line", "strokeDash": DASHED, "strokeWidth": 1, "color": INK}, both))
        layers[-1]["data"] = {"values": [{"end": end} for end in diagonal]}
    names = list(looks if joined is None else joined)
    if names:
        line = {"type": "line", "strokeWidth": 1.5} | ({"interpolate": "step-after"} if step else {})
        has_dashes = any(look.dash != SOLID for look in looks.values())
        dash = {"strokeDash": _by_series(looks, "dash", shown)} if has_dashes else {}
        layers.append(layer(line, place | dash, {"field": "series", "oneOf": names}))
    layers += _error_bars(points, place, "y", y)
    if dots:
        layers.append(_dots(place, looks, shown))
    else:
        size = {"type": "point", "size": 8, "opacity": 0 if quiet else 1}
        layers.append(layer(size, place | {"tooltip": TOOLTIP}, MEASURED))
    if any(each.get("label") for each in points):
        text = LABEL | {"align": "right", "baseline": "bottom", "dx": -4, "dy": -4}
        label = {"x": place["x"], "y": place["y"], "text": {"field": "label"}}
        layers.append(layer(text, label, "datum.label"))
    return Panel(title, layered(points, layers, WIDTH, HEIGHT), looks, note)


def beside_names(
    title: str,
    points: Sequence[Point],
    looks: Mapping[str, Look],
    names: Sequence[str],
    x: dict[str, Any],
    *,
    apart: bool = False,
    levels: Sequence[float] = (),
) -> Panel:
    """Dots with error bars, a line for each name.

    Args:
        title: title of the panel.
        points: as `dot` makes them.
        looks: series to its look, in the order of the legend.
        names: names of the lines, from top to bottom.
        x: options of the horizontal axis: title, scale, axis.
        apart: whether the series of a line stand below each other.
        levels: values at which a vertical line is drawn.
    """
    x, shown = _roomy(x), _legend(looks, orient="top")
    lane = {"y": {"field": "name", "type": "nominal", "scale": {"domain": list(names)}, "sort": None, "title": None}}
    if apart:
        lane["yOffset"] = {"field": "series", "type": "nominal", "sort": list(looks)}
    layers = []
    if levels:
        layers.append(layer({"type": "rule", "color": INK}, {"x": quantity("level", x)}))
        layers[-1]["data"] = {"values": [{"level": level} for level in levels]}
    place = {"x": quantity("x", x), **lane, "stroke": _by_series(looks, "colour", shown)}
    layers += [*_error_bars(points, place, "x", x), _dots(place, looks, shown)]
    return Panel(title, layered(points, layers, WIDTH, LINE * len(names) * (1.5 if apart else 1)), looks)


def quantity(name: str, options: Mapping[str, Any]) -> Spec:
    """A position that a number of each point decides."""
    return {"field": name, "type": "quantitative", **options}


def layer(mark: Spec, encoding: Spec, only: Any = None) -> Spec:
    """Marks of one kind; only: a filter of the points."""
    return {"mark": mark, "encoding": encoding} | ({"transform": [{"filter": only}]} if only else {})


def layered(points: Sequence[Mapping[str, Any]], layers: Sequence[Spec], width: float, height: float) -> Spec:
    """Layers that draw the same points, or their own data.

    Args:
        points: plain values, which the layers share.
        layers: from the lowest to the highest.
        width: width of the panel in pixels.
        height: height of the panel in pixels.
    """
    return {"data": {"values": list(points)}, "layer": list(layers), "width": width, "height": height}


def _measured(axis: str, value: float, interval: Interval, told: str) -> Point:
    low, high = (value if bound is None else bound for bound in interval)
    bounds = f" ({short(low)} to {short(high)})" if low < high else ""
    return {axis: value, "low": min(low, value), "high": max(high, value), "tooltip": f"{told}\n{short(value)}{bounds}"}


def _error_bars(points: Sequence[Point], place: Spec, axis: str, options: Spec) -> list[Spec]:
    """Bars along an axis between the points' "low" and "high", with ticks at their ends."""
    if not any("low" in each and each["low"] < each["high"] for each in points):
        return []
    low, high = (place | {axis: quantity(end, options)} for end in ("low", "high"))
    tick = {
        "type": "tick",
        "thickness": 1,
        "size": 6,
        "opacity": 1,
        "orient": "horizontal" if axis == "y" else "vertical",
    }
    bar = layer({"type": "rule"}, low | {f"{axis}2": {"field": "high"}}, HAS_BAR)
    return [bar, layer(tick, low, HAS_BAR), layer(tick, high, HAS_BAR)]


def _dots(place: Spec, looks: Mapping[str, Look], legend: Spec | None) -> Spec:
    filled = [look.colour if look.filled else "transparent" for look in looks.values()]
    fill = _by_series(looks, "colour", legend) | {"scale": {"domain": list(looks), "range": filled}}
    dot_mark = {"type": "point", "size": 40, "strokeWidth": 1.4, "opacity": 1}
    return layer(
        dot_mark, place | {"fill": fill, "shape": _by_series(looks, "shape", legend), "tooltip": TOOLTIP}, MEASURED
    )


def _cut(points: Sequence[Point], top: float, *, geometric: bool) -> list[Point]:
    """Points up to the top of the axis: a curve ends where it leaves the picture, and begins where it comes back.

    Vega can clip curves itself, but a PNG then takes several times as long.
    """
    found: list[Point] = []
    for before, each in zip([None, *points], points):  # one shorter than the first
        leaves = before is not None and (before["y"] > top) != (each["y"] > top)
        if before is not None and leaves and before["series"] == each["series"]:
            share, step = (top - before["y"]) / (each["y"] - before["y"]), each["x"] - before["x"]
            at = before["x"] * (each["x"] / before["x"]) ** share if geometric else before["x"] + share * step
            found.append({"series": each["series"], "x": at, "y": top})
        kept = each | {"high": min(each["high"], top)}
        found.append({"series": each["series"], "x": each["x"], "y": None} if each["y"] > top else kept)
    return found


def _levels(levels: Mapping[str, float], y: Spec) -> list[Spec]:
    """Dashed lines, with their names above their right ends."""
    told = [
        {"level": value, "name": name, "tooltip": f"{name}\n{short(value)}".strip()} for name, value in levels.items()
    ]
    at, data = {"y": quantity("level", y)}, {"data": {"values": told}}
    text = LABEL | {"align": "right", "baseline": "bottom", "dy": -2}
    rule = layer({"type": "rule", "strokeDash": DASHED, "color": INK}, at | {"tooltip": TOOLTIP})
    named = layer(text, at | {"x": {"value": WIDTH - 4}, "text": {"field": "name"}})
    return [rule | data, named | data] if levels else []


def _by_series(looks: Mapping[str, Look], part: str, legend: Spec | None) -> Spec:
    scale = {"domain": list(looks), "range": [getattr(look, part) for look in looks.values()]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": legend}


def _legend(looks: Mapping[str, Look], **options: Any) -> Spec | None:
    return {"title": None} | options if len(looks) > 1 else None


def _roomy(options: Spec) -> Spec:
    """Options of an axis that need not begin at 0, with room for the marks at its ends."""
    scale = {"nice": False} | options.get("scale", {})
    if scale.get("type") != "log":
        scale = {"zero": False} | scale
    return options | {"scale": scale if "domain" in scale else {"padding": 8} | scale}
