"""Figures by their names, and how the panels of one become a PNG: without a browser, without a network."""

import textwrap
from collections.abc import Callable, Sequence

import vl_convert

from landmark.results.figures import accuracy, drop_rate, heatmap, lines, recall, rows, unique_blocks
from landmark.results.figures.marks import Panel, Spec
from landmark.results.tables import Table

_SMALL = {"labelFontSize": 10, "titleFontSize": 10, "titleFontWeight": "normal", "labelLimit": 300}
_GREY = {"gridColor": "#E3E3E3", "domainColor": "#888888", "tickColor": "#888888"}
CONFIG: Spec = {
    "background": "white",
    "view": {"stroke": "#888888"},
    "axis": {**_SMALL, **_GREY, "titleFontSize": 11, "labelFlush": False},
    "legend": {**_SMALL, "symbolOpacity": 1},
    "title": {"fontSize": 12, "fontWeight": "normal", "subtitleFontSize": 10},
}
_APART: Spec = {"scale": dict.fromkeys(("stroke", "fill", "color", "shape", "strokeDash"), "independent")}
_PANELS: dict[str, Callable[[Table], list[list[Panel]]]] = {
    "rows": rows.panels,
    "lines": lines.panels,
    "heatmap": heatmap.panels,
    "accuracy": accuracy.panels,
    "drop_rate": drop_rate.panels,
    "recall": recall.panels,
    "unique_blocks": unique_blocks.panels,
}


def panels(table: Table) -> list[list[Panel]]:
    """Lines of panels: what the table's `figure` shows. A heat map without cells falls back to rows."""
    figure = "rows" if table.figure == "heatmap" and not table.cells else table.figure
    return _PANELS[figure](table)


def png(title: str, drawn: Sequence[Sequence[Panel]]) -> bytes:
    """A picture of lines of panels below a title. Panels of one line that show the same series share a legend."""
    header = {"text": title, "anchor": "middle", "fontSize": 12, "offset": 14}
    spec = {"title": header, "vconcat": [_line(panels) for panels in drawn], "spacing": 24, "resolve": _APART}
    return vl_convert.vegalite_to_png(spec, scale=1.5, config=CONFIG)


def _line(panels: Sequence[Panel]) -> Spec:
    titled = []
    for panel in panels:
        note = {"subtitle": textwrap.wrap(panel.note, 72, break_on_hyphens=False)} if panel.note else {}
        titled.append(panel.spec | {"title": {"text": panel.title, **note}})
    alike = len(panels) > 1 and len({tuple(panel.looks) for panel in panels}) == 1
    return {"hconcat": titled, "spacing": 24} | ({} if alike else {"resolve": _APART})
