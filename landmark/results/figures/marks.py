"""Panels of a figure in Vega-Lite, made from points that are plain values: curves, and dots beside names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from landmark.results.figures.style import DASHED, INK, SOLID, Look

Spec = dict[str, Any]
Point = dict[str, Any]
Interval = tuple[float | None, float | None]
WIDTH, HEIGHT, LINE = 400, 270, 22  # pixels: of a panel, and the height of a line of dots
LABEL = {"type": "text", "fontSize": 10, "color": INK}
TOOLTIP = {"field": "tooltip", "type": "nominal"}
_MEASURED = [{"filter": "isValid(datum.tooltip)"}]
_DOTS = {"type": "point", "size": 40, "strokeWidth": 1.4, "opacity": 1}


@dataclass(frozen=True)
class Panel:
    """A part of a figure: a Vega-Lite specification without its title.

    looks: its series, where there are several; the last layer draws them. note: a remark that stands below the title.
    """

    title: str
    spec: Spec
    looks: Mapping[str, Look] = field(default_factory=dict)
    note: str = ""

    def fading(self) -> Spec:
        """The specification, in which a click on the legend fades the other series; for a panel with its own legend."""
        if len(self.looks) < 2:
            return self.spec
        *below, series = self.spec["layer"]
        first, *others = series["layer"]
        chosen = {"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
        faded = {"condition": {"param": "chosen", "value": 1}, "value": 0.12}
        layers = [first | {"params": [chosen]}, *others]
        return self.spec | {"layer": [*below, {"layer": layers, "encoding": series["encoding"] | {"opacity": faded}}]}


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
    x: Spec,
    y: Spec,
    *,
    joined: Iterable[str] | None = None,
    marks: Literal["dots", "small", "hidden"] = "dots",
    step: bool = False,
    legend: str | None = None,
    below: Sequence[Spec] = (),
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
        marks: how points are marked; hidden ones have a tooltip alone.
        step: whether a value holds until the next point.
        legend: title of the legend.
        below: layers below the curves, as `reference` makes them.
        note: a remark below the title, as "above: random_2048".
    """
    x, y = _roomy(x), _roomy(y)
    shown = _legend(looks, title=legend, **({} if marks == "dots" else {"symbolType": "stroke", "symbolSize": 400}))
    if "domain" in y["scale"]:
        points = _cut(points, y["scale"]["domain"][-1], geometric=x["scale"].get("type") == "log")
    layers = []
    if names := list(looks if joined is None else joined):
        has_dashes = any(look.dash != SOLID for look in looks.values())
        line = {
            "mark": {"type": "line", "strokeWidth": 1.5, "interpolate": "step-after" if step else "linear"},
            "encoding": {"strokeDash": _by_series(looks, "dash", shown)} if has_dashes else {},
            "transform": [{"filter": {"field": "series", "oneOf": names}}],
        }
        layers.append(line)
    if any("label" in each for each in points):
        text = LABEL | {"align": "right", "baseline": "bottom", "dx": -4, "dy": -4}
        label = {"text": {"field": "label"}, "stroke": None}
        layers.append({"mark": text, "encoding": label, "transform": [{"filter": "datum.label"}]})
    if marks == "dots":
        layers += [*_error_bars(points, "y"), _dots(looks, shown)]
    else:
        hidden = {"opacity": {"value": 0}} if marks == "hidden" else {}
        small = {"type": "point", "size": 8}
        layers.append({"mark": small, "encoding": {"tooltip": TOOLTIP} | hidden, "transform": _MEASURED})
    place = {"x": quantity("x", x), "y": quantity("y", y), "stroke": _by_series(looks, "colour", shown)}
    spec = layered(points, [*below, {"layer": layers, "encoding": place}], WIDTH, HEIGHT)
    return Panel(title, spec, looks, note)


def beside_names(
    title: str,
    points: Sequence[Point],
    looks: Mapping[str, Look],
    names: Sequence[str],
    x: Spec,
    *,
    apart: bool = False,
    below: Sequence[Spec] = (),
) -> Panel:
    """Dots with error bars, a line for each name.

    Args:
        title: title of the panel.
        points: as `dot` makes them.
        looks: series to its look, in the order of the legend.
        names: names of the lines, from top to bottom.
        x: options of the horizontal axis: title, scale, axis.
        apart: whether the series of a line stand below each other.
        below: layers below the dots, as `reference` makes them.
    """
    legend = _legend(looks, orient="top")
    lane = {"y": {"field": "name", "type": "nominal", "scale": {"domain": list(names)}, "sort": None, "title": None}}
    if apart:
        lane["yOffset"] = {"field": "series", "type": "nominal", "sort": list(looks)}
    place = {"x": quantity("x", _roomy(x)), **lane, "stroke": _by_series(looks, "colour", legend)}
    dots = {"layer": [*_error_bars(points, "x"), _dots(looks, legend)], "encoding": place}
    return Panel(title, layered(points, [*below, dots], WIDTH, LINE * len(names) * (1.5 if apart else 1)), looks)


def reference(*, dashed: bool = True, **ends: float) -> Spec:
    """A line across the panel, as `reference(y=0)`, or one between x, y and x2, y2."""
    mark = {"type": "rule", "color": INK} | ({"strokeDash": DASHED} if dashed else {})
    return once(mark, {end: {"datum": value, "axis": {"grid": True}} for end, value in ends.items()})


def once(mark: Spec, encoding: Spec) -> Spec:
    """A mark that stands for no point of the panel."""
    return {"mark": mark, "encoding": encoding, "data": {"values": [{}]}}


def quantity(name: str, options: Mapping[str, Any]) -> Spec:
    """A position that a number of each point decides."""
    return {"field": name, "type": "quantitative", **options}


def layered(points: Sequence[Mapping[str, Any]], layers: Sequence[Spec], width: float, height: float) -> Spec:
    """Layers that draw the same points.

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


def _error_bars(points: Sequence[Point], axis: str) -> list[Spec]:
    """Bars along an axis between the points' "low" and "high", with ticks at their ends."""
    if not any("low" in each and each["low"] < each["high"] for each in points):
        return []
    low, high = ({axis: {"field": end}} for end in ("low", "high"))
    tick = {"type": "tick", "thickness": 1, "size": 6, "opacity": 1}
    tick["orient"] = "horizontal" if axis == "y" else "vertical"
    drawn = (("rule", low | {f"{axis}2": {"field": "high"}}), (tick, low), (tick, high))
    only = [{"filter": "datum.low < datum.high"}]
    return [{"mark": mark, "encoding": place, "transform": only} for mark, place in drawn]


def _dots(looks: Mapping[str, Look], legend: Spec | None) -> Spec:
    by_look = {channel: _by_series(looks, channel, legend) for channel in ("fill", "shape")}
    return {"mark": _DOTS, "encoding": by_look | {"tooltip": TOOLTIP}, "transform": _MEASURED}


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
