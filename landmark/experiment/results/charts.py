"""Panels by Altair: curves, dots beside names, and maps of a text; and their PNG, without a browser."""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

import altair as alt

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"transformer": "#0072B2", "landmark": "#D55E00", "transformer_xl": "#009E73"}
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#999999")
BEYOND_PALETTE = ("#8C564B", "#7A4FBF", "#8A9A00")  # where a figure needs more
INK = "#333333"  # of the paper's numbers and of reference lines
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
CROSS = "M-.7,-.7L.7,.7M-.7,.7L.7,-.7"
SOLID, DASHED, DOTTED = (1, 0), (6, 3), (2, 2)
WIDTH, HEIGHT, LINE, SIDE = 400, 270, 22, 320  # pixels: of a panel, of a line of dots, of a square map
_HEAT = ["#FFFFFF", "#FDD0A2", "#E6550D", "#7F2704"]
_APART: dict[str, Any] = dict.fromkeys(("stroke", "fill", "shape", "strokeDash"), "independent")  # scales, and legends
_SMALL = {"labelFontSize": 10, "titleFontSize": 10, "titleFontWeight": "normal", "labelLimit": 300}
_GREY = {"gridColor": "#E3E3E3", "domainColor": "#888888", "tickColor": "#888888"}
_STYLE: dict[str, Any] = {
    "background": "white",
    "view": {"stroke": "#888888"},
    "axis": {**_SMALL, **_GREY, "titleFontSize": 11, "labelFlush": False},
    "legend": {**_SMALL, "symbolOpacity": 1},
    "title": {"fontSize": 12, "fontWeight": "normal", "subtitleFontSize": 10},
}
Point = dict[str, Any]
Interval = tuple[float | None, float | None]
Options = dict[str, Any]  # of an axis: title, scale, axis
Looks = Mapping[str, "Look"]  # of series, in the order of the legend


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


@dataclass(frozen=True)
class Panel:
    """A part of a picture. looks: its series, where there are several. note: a remark that stands below the title."""

    title: str
    chart: alt.LayerChart  # without the title
    looks: Looks = field(default_factory=dict)
    note: str = ""


def png(title: str, lines: Sequence[Sequence[Panel]]) -> bytes:
    """A picture of lines of panels below a title. Panels of one line that show the same series share a legend."""
    drawn = []
    for panels in lines:
        line = alt.hconcat(*map(_titled, panels), spacing=24)
        alike = len(panels) > 1 and len({tuple(panel.looks) for panel in panels}) == 1
        drawn.append(line if alike else line.resolve_scale(**_APART))
    header = alt.TitleParams(title, anchor="middle", fontSize=12, offset=14)
    picture = alt.vconcat(*drawn, title=header, spacing=24).resolve_scale(**_APART).configure(**_STYLE)
    output = io.BytesIO()
    picture.save(output, format="png", scale_factor=1.5)
    return output.getvalue()


def _titled(panel: Panel) -> Any:
    note = textwrap.wrap(panel.note, 72, break_on_hyphens=False) if panel.note else alt.Undefined
    return panel.chart.properties(title=alt.TitleParams(panel.title, subtitle=note))


# ---- colours


def series_looks(models: Mapping[str, str]) -> dict[str, Look]:
    """A colour and a shape for each series, whose model `models` names: for the first of a model the model's colour."""
    absent = [colour for model, colour in COLOURS.items() if model not in models.values()]
    free = cycle([*(colour for colour in PALETTE if colour not in COLOURS.values()), *absent, *BEYOND_PALETTE])
    looks: dict[str, Look] = {}
    for (name, model), shape in zip(models.items(), cycle(SHAPES)):
        usual = COLOURS.get(model)
        is_free = usual is not None and all(look.colour != usual for look in looks.values())
        looks[name] = Look(usual if usual and is_free else next(free), shape)
    return looks


# ---- points, and the axes they stand on


def point(series: str, x: float, y: float, interval: Interval = (None, None)) -> Point:
    """A point of a curve. interval: ends of its error bar."""
    return {"series": series, "x": x, "y": y, **_bar(y, interval)}


def dot(series: str, name: str, x: float, interval: Interval = (None, None)) -> Point:
    """A measurement of a series in the line of a name. interval: ends of its error bar."""
    return {"series": series, "name": name, "x": x, **_bar(x, interval)}


def _bar(value: float, interval: Interval) -> Point:
    low, high = (value if bound is None else bound for bound in interval)
    return {"low": min(low, value), "high": max(high, value)}


def around(value: float, error: float | None) -> tuple[float, float]:
    """Ends of the error bar of a value."""
    return value - (error or 0.0), value + (error or 0.0)


def length_axis(lengths: Sequence[int]) -> Options:
    """An axis of evaluation lengths, doubling; where some are long, they are written as 8K, 128K and 1M."""
    is_short = "datum.value % 1024 == 0" if max(lengths) >= 65536 else "false"
    shortened = "datum.value % 1048576 ? datum.value / 1024 + 'K' : datum.value / 1048576 + 'M'"
    label = f"{is_short} ? {shortened} : format(datum.value, ',')"
    return {
        "title": "evaluation length, tokens",
        "scale": {"type": "log", "base": 2, "domain": [min(lengths) / 1.25, max(lengths) * 1.25]},
        "axis": {"values": sorted(set(lengths)), "labelExpr": label, "labelOverlap": "greedy"},
    }


def frame(values: Mapping[str, Sequence[float]], highest: float) -> tuple[Options, str]:
    """An axis without values above `highest`, and a note that names their series; both empty if there are none."""
    above = [name for name, each in values.items() if any(value > highest for value in each)]
    inside = [value for each in values.values() for value in each if value <= highest]
    if not above or not inside:
        return {}, ""
    low, high = min(inside), max(inside)
    room = 0.06 * (high - low)
    return {"domain": [low - room, high + room]}, f"above: {', '.join(above)}"


# ---- panels


def curves(
    title: str,
    points: Sequence[Point],
    looks: Looks,
    x: Options,
    y: Options,
    *,
    step: bool = False,
    below: Sequence[alt.Chart] = (),
    note: str = "",
) -> Panel:
    """Curves over an axis of numbers. Points above the domain of y's scale are left out, and the curve has a gap.

    points: of `point`, in order. step: a value holds until the next point, and points are not marked. below: charts of
    `reference`.
    """
    top = y.get("scale", {}).get("domain", [math.inf])[-1]
    absent = dict.fromkeys(("y", "low", "high"))
    points = [each | ({"high": min(each["high"], top)} if each["y"] <= top else absent) for each in points]
    key = _legend(looks, **({"symbolType": "stroke", "symbolSize": 400} if step else {}))
    across = _axis(alt.X, "x", x)
    base = alt.Chart().encode(across, _axis(alt.Y, "y", y), _by_series(alt.Stroke, looks, "colour", key))
    line = base.mark_line(strokeWidth=1.5, interpolate="step-after" if step else "linear")
    if any(look.dash != SOLID for look in looks.values()):
        line = line.encode(_by_series(alt.StrokeDash, looks, "dash", key))
    layers = [line]
    if not step:
        layers += [*_error_bars(base, points, alt.Y, y), _dots(base, looks, key)]
    return Panel(title, _layered(points, [*below, *layers], WIDTH, HEIGHT), looks, note)


def beside_names(
    title: str,
    points: Sequence[Point],
    looks: Looks,
    names: Sequence[str],
    x: Options,
    *,
    apart: bool = False,
    below: Sequence[alt.Chart] = (),
) -> Panel:
    """Dots with error bars, as `dot` makes them, a line for each name. apart: its series stand below each other."""
    key = _legend(looks, orient="top")
    lane = alt.Y("name:N", title=None, sort=None, scale=alt.Scale(domain=list(names)))
    base = alt.Chart().encode(_axis(alt.X, "x", x), lane, _by_series(alt.Stroke, looks, "colour", key))
    if apart:
        base = base.encode(alt.YOffset("series:N", sort=list(looks)))
    layers = [*_error_bars(base, points, alt.X, x), _dots(base, looks, key)]
    height = LINE * len(names) * (1.5 if apart else 1)
    return Panel(title, _layered(points, [*below, *layers], WIDTH, height), looks)


def reference(*, dashed: bool = True, **at: float) -> alt.Chart:
    """A line across the panel, as `reference(y=0)` or `reference(x=1)`."""
    kinds: dict[str, Any] = {"x": alt.XDatum, "y": alt.YDatum}
    places = {axis: kinds[axis](value, axis=alt.Axis(grid=True)) for axis, value in at.items()}
    return _once().mark_rule(color=INK, strokeDash=DASHED if dashed else SOLID).encode(**places)


def square_map(
    title: str,
    values: Sequence[Sequence[float]],
    cell: int,
    length: int,
    titles: tuple[str, str, str],
    *,
    highest: float,
    marked: int,
    note: str = "",
) -> Panel:
    """A map of a text over itself. Cells of 0 are left blank. values: for each cell across the values upwards. cell,
    length: tokens of a side, and of the text. titles: across, up, values. highest: darkest. marked: a position with
    dashed lines.
    """
    across, up, measured = titles
    made = [
        {"x": x * cell, "x2": (x + 1) * cell, "y": y * cell, "y2": (y + 1) * cell, "value": value}
        for x, column in enumerate(values)
        for y, value in enumerate(column)
        if value
    ]
    axis = {"scale": {"domain": [0, length]}, "axis": {"format": ",d", "tickCount": 5, "grid": False}}
    places = [
        _axis(alt.X, "x", {"title": f"{across}, tokens"} | axis),
        _axis(alt.Y, "y", {"title": f"{up}, tokens"} | axis),
    ]
    scale = alt.Scale(range=_HEAT, interpolate="rgb", domain=[0, highest or 1])
    shade = alt.Fill("value:Q", scale=scale, legend=alt.Legend(title=measured, gradientLength=SIDE / 2))
    squares = alt.Chart().mark_rect().encode(*places, alt.X2("x2"), alt.Y2("y2"), shade)
    rule = _once().mark_rule(color="#888888", strokeDash=DASHED)
    chart = _layered(made, [squares, *(rule.encode(**{way: alt.datum(marked)}) for way in "xy")], SIDE, SIDE)
    return Panel(title, chart.properties(view={"fill": _HEAT[0]}), note=note)


def _once() -> alt.Chart:
    """A chart of one mark that stands for no point of the panel."""
    return alt.Chart(alt.InlineData(values=[{}]))


def _layered(points: Sequence[Point], layers: Sequence[alt.Chart], width: float, height: float) -> Any:
    """Layers that draw the same points, from the lowest to the highest."""
    return alt.layer(*layers, data=alt.InlineData(values=list(points))).properties(width=width, height=height)


def _axis(kind: Any, name: str, options: Options) -> Any:
    """A position that a number of each point decides: the axis need not begin at 0, and has room at its ends."""
    scale = {"nice": False} | options.get("scale", {})
    if scale.get("type") != "log":
        scale = {"zero": False} | scale
    if "domain" not in scale:
        scale = {"padding": 8} | scale
    return kind(name, type="quantitative", title=options["title"], scale=scale, axis=options.get("axis", {}))


def _error_bars(base: alt.Chart, points: Sequence[Point], kind: Any, options: Options) -> list[alt.Chart]:
    """Bars along an axis between the points' "low" and "high", with ticks at their ends."""
    if not any(each["high"] is not None and each["low"] < each["high"] for each in points):
        return []
    low, high = (_axis(kind, end, options) for end in ("low", "high"))
    tick = base.mark_tick(thickness=1, size=6, opacity=1, orient="vertical" if kind is alt.X else "horizontal")
    bar = base.mark_rule().encode(low, (alt.X2 if kind is alt.X else alt.Y2)("high"))
    return [each.transform_filter("datum.low < datum.high") for each in (bar, tick.encode(low), tick.encode(high))]


def _dots(base: alt.Chart, looks: Looks, key: Options | None) -> alt.Chart:
    by_look = _by_series(alt.Fill, looks, "fill", key), _by_series(alt.Shape, looks, "shape", key)
    return base.mark_point(size=40, strokeWidth=1.4, opacity=1).encode(*by_look)


def _by_series(kind: Any, looks: Looks, part: str, key: Options | None) -> Any:
    scale = alt.Scale(domain=list(looks), range=[getattr(look, part) for look in looks.values()])
    return kind("series:N", scale=scale, legend=key)


def _legend(looks: Looks, **options: Any) -> Options | None:
    return {"title": None} | options if len(looks) > 1 else None
