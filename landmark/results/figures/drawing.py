"""How panels become a PNG: without a browser, without a network."""

import textwrap
from collections.abc import Sequence

from landmark.results.figures.marks import Panel, Spec

_SMALL = {"labelFontSize": 10, "titleFontSize": 10, "titleFontWeight": "normal", "labelLimit": 300}
_GREY = {"gridColor": "#E3E3E3", "domainColor": "#888888", "tickColor": "#888888"}
_CONFIG: Spec = {
    "background": "white",
    "view": {"stroke": "#888888"},
    "axis": {**_SMALL, **_GREY, "titleFontSize": 11, "labelFlush": False},
    "legend": {**_SMALL, "symbolOpacity": 1},
    "title": {"fontSize": 12, "fontWeight": "normal", "subtitleFontSize": 10},
}
_APART: Spec = {"scale": dict.fromkeys(("stroke", "fill", "color", "shape", "strokeDash"), "independent")}


def png(title: str, drawn: Sequence[Sequence[Panel]]) -> bytes:
    """A picture of lines of panels below a title. Panels of one line that show the same series share a legend."""
    import vl_convert  # takes long to load

    header = {"text": title, "anchor": "middle", "fontSize": 12, "offset": 14}
    spec = {"title": header, "vconcat": [_line(panels) for panels in drawn], "spacing": 24, "resolve": _APART}
    return vl_convert.vegalite_to_png(spec, scale=1.5, config=_CONFIG)


def _line(panels: Sequence[Panel]) -> Spec:
    titled = []
    for panel in panels:
        note = {"subtitle": textwrap.wrap(panel.note, 72, break_on_hyphens=False)} if panel.note else {}
        titled.append(panel.spec | {"title": {"text": panel.title, **note}})
    alike = len(panels) > 1 and len({tuple(panel.looks) for panel in panels}) == 1
    return {"hconcat": titled, "spacing": 24} | ({} if alike else {"resolve": _APART})
