"""What all pictures share: colours, and how a figure becomes a PNG."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from landmark.results.tables import Table, TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"transformer": "#0072B2", "landmark": "#D55E00", "transformer_xl": "#009E73"}
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#999999")
MARKERS = "osD^vPX*"
PAPER = "#333333"


def new_figure(table: Table, width: float, height: float) -> "Figure":
    """A figure of so many inches under the table's header."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(table.header, fontsize=9)
    return figure


def png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def series(table: Table) -> dict[str, list[TableRow]]:
    """Rows that differ in their length, by the name that they share, shortest first."""
    found: dict[str, list[TableRow]] = {}
    for row in table.rows:
        found.setdefault(row.series, []).append(row)
    return {name: sorted(rows, key=lambda row: row.length) for name, rows in found.items()}


def series_colours(found: dict[str, list[TableRow]]) -> dict[str, str]:
    """The colour of a model for its first series, others of the palette for the rest."""
    chosen: dict[str, str] = {}
    for name, rows in found.items():
        usual = COLOURS.get(rows[0].model)
        if usual is not None and usual not in chosen.values():
            chosen[name] = usual
    free = [colour for colour in PALETTE if colour not in COLOURS.values()]
    others = [name for name in found if name not in chosen]
    chosen |= {name: free[number % len(free)] for number, name in enumerate(others)}
    return chosen


def colours(count: int) -> list[Any]:
    """So many colours: the palette, or where it does not suffice evenly spaced ones."""
    from matplotlib import colormaps

    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return [colormaps["turbo"](0.05 + 0.9 * number / (count - 1)) for number in range(count)]


def keep_in_frame(axes: "Axes", values: Mapping[str, Sequence[float]], highest: float) -> None:
    """Let values above `highest` leave the axes, and name whose they are: they would flatten all others."""
    above = [name for name, each in values.items() if any(value > highest for value in each)]
    inside = [value for each in values.values() for value in each if value <= highest]
    if not above or not inside:
        return
    low, high = min(inside), max(inside)
    axes.set_ylim(low - 0.06 * (high - low), high + 0.15 * (high - low))
    text = f"above: {', '.join(above)}"
    axes.annotate(text, (0.99, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=7)


def length_axis(axes: "Axes", lengths: Iterable[int]) -> None:
    """Evaluation lengths along x, doubling; long ones as 128K and 1M."""
    lengths = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("evaluation length, tokens")


def _short(length: int) -> str:
    if length >= 1 << 16 and length % 1024 == 0:
        return f"{length >> 20}M" if length % (1 << 20) == 0 else f"{length >> 10}K"
    return f"{length:,}"
