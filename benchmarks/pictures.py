"""Pictures against the length of the context: time of a chunk and memory kept; searching, and what is found."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks import growth, search
from benchmarks.report import Row
from landmark.results.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PER_HEAD = "#CC79A7"  # Okabe and Ito's, as the others
# Colour, line and marker.
STYLES = {
    growth.PLAIN: (COLOURS["transformer"], "-", "s"),
    growth.LANDMARK: (COLOURS["landmark"], "-", "o"),
    growth.NO_SCAN: (COLOURS["landmark"], ":", "o"),
    growth.PER_HEAD: (PER_HEAD, "-", "^"),
    growth.RECENT: (COLOURS["transformer_xl"], "-", "D"),
    growth.SCATTERED: (COLOURS["landmark"], "--", "x"),
    growth.PREFIX: (COLOURS["transformer"], "-", "s"),
    growth.BLOCKS: (COLOURS["landmark"], "-", "o"),
    search.SCAN: (COLOURS["landmark"], "-", "o"),
    search.FLAT: (COLOURS["transformer"], "-", "s"),
    search.INVERTED: (COLOURS["transformer_xl"], "-", "D"),
}


def draw(rows: Sequence[Row], title: str) -> bytes:
    """A PNG. Left: time of a chunk. Right: memory kept. All axes are logarithmic."""
    times, kept = ([row for row in rows if row.unit == unit] for unit in ("ms", "MB"))
    return _png(title, [(times, "time of a chunk, ms", "log"), (kept, "keys and values kept, MB", "log")])


def draw_search(rows: Sequence[Row], title: str) -> bytes:
    """A PNG. Time of searching for a chunk, for a token; the share of what a scan finds that is found."""
    parts = [(search.CHUNK, "search for a chunk, ms", "log"), (search.TOKEN, "search for a token, ms", "log")]
    parts.append((search.RECALL, "share of what a scan finds", "linear"))
    panels = [([row for row in rows if row.setting.startswith(what)], label, axis) for what, label, axis in parts]
    return _png(title, panels)


def _png(title: str, panels: Sequence[tuple[Sequence[Row], str, str]]) -> bytes:
    """A panel for each: its rows, the label and the kind of its y axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, found = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4.4), layout="constrained", squeeze=False
    )
    try:
        for axes, (rows, label, kind) in zip(found[0], panels, strict=True):
            _curves(rows, axes, label, kind)
        figure.suptitle(title, fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    finally:
        pyplot.close(figure)
    return buffer.getvalue()


def _curves(rows: Sequence[Row], axes: "Axes", label: str, kind: str) -> None:
    from matplotlib.ticker import LogLocator

    for name, (colour, line, marker) in STYLES.items():
        points = sorted((row.context or 0, row.value) for row in rows if row.measured == name)
        if points:
            axes.errorbar(
                [context for context, _ in points],
                [value.median for _, value in points],
                yerr=[
                    [value.median - value.low for _, value in points],
                    [value.high - value.median for _, value in points],
                ],
                color=colour,
                linestyle=line,
                marker=marker,
                markersize=8 if marker == "s" else 5,
                markerfacecolor="none" if marker == "s" else colour,
                capsize=3,
                label=name,
            )
    contexts = sorted({row.context or 0 for row in rows})
    axes.set(xscale="log", yscale=kind, xlabel="context before the chunk, tokens", ylabel=label)
    axes.set_xticks(
        contexts, [f"{context / 1e6:g}M" if context >= 1e6 else f"{context / 1e3:g}K" for context in contexts]
    )
    if kind == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.05)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
