"""Time of a chunk and memory kept against the length of the context."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.benchmarks import growth
from experiments.benchmarks.report import Row
from landmark.lab.plots import COLOURS

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
}


def draw(rows: Sequence[Row], title: str) -> bytes:
    """A PNG. Left: time of a chunk. Right: memory kept. All axes are logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    try:
        _curves([row for row in rows if row.unit == "ms"], left, "time of a chunk, ms")
        _curves([row for row in rows if row.unit == "MB"], right, "keys and values kept, MB")
        figure.suptitle(title, fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    finally:
        pyplot.close(figure)
    return buffer.getvalue()


def _curves(rows: Sequence[Row], axes: "Axes", label: str) -> None:
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
    axes.set(xscale="log", yscale="log", xlabel="context before the chunk, tokens", ylabel=label)
    axes.set_xticks(contexts, [f"{context / 1000:g}K" for context in contexts])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
