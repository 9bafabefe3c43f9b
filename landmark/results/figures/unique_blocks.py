"""Distinct blocks that a chunk retrieves, by layer and over all layers (paper, Figure 5), and their bytes."""

from typing import TYPE_CHECKING

from landmark.results.figures.style import PALETTE, PAPER, new_figure
from landmark.results.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Counts = list[int]  # samples that retrieve 0, 1, 2, … distinct blocks


def draw(table: Table) -> "Figure":
    """Above, a panel for each row: quartiles, extremes and mean of each layer. Below: all layers together; bytes."""
    counts = {row.name: _layers(table, row.name) for row in table.rows if row.distinct_blocks is not None}
    figure = new_figure(table, 11, 7)
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    panels = above.subplots(1, max(1, len(counts)), sharey=True, squeeze=False)[0]
    for panel, colour, (name, layers) in zip(panels, PALETTE, counts.items()):
        _by_layer(name, layers, panel, colour)
    panels[0].set_ylabel("distinct blocks")
    left, right = below.subplots(1, 2)
    _together(counts, left)
    _moved(table, right)
    return figure


def _layers(table: Table, name: str) -> list[Counts]:
    """Of each layer, seeds pooled."""
    found = [record["results"]["retrieval"]["layers"] for record in table.records[name]]
    return [[sum(same) for same in zip(*(layer["distinct_blocks"] for layer in seeds))] for seeds in zip(*found)]


def _by_layer(name: str, layers: list[Counts], axes: "Axes", colour: str) -> None:
    samples = [[number for number, count in enumerate(counts) for _ in range(count)] for counts in layers]
    boxes = axes.boxplot(
        samples,
        whis=(0, 100),
        showmeans=True,
        widths=0.6,
        patch_artist=True,
        medianprops={"color": PAPER},
        meanprops={"marker": "D", "markerfacecolor": "white", "markeredgecolor": PAPER, "markersize": 4},
    )
    for box in boxes["boxes"]:
        box.set(facecolor=colour, alpha=0.5)
    cached = len(layers[0]) - 1
    axes.axhline(cached, color=PAPER, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, cached * 1.06)
    axes.set_xticks(range(1, len(layers) + 1), [str(layer) for layer in range(len(layers))])
    axes.set_title(name, fontsize=9)
    axes.set_xlabel(f"layer (dashed: the {cached} blocks cached)")
    axes.grid(alpha=0.3, axis="y")


def _together(counts: dict[str, list[Counts]], axes: "Axes") -> None:
    """The paper's picture: each layer of each sample is one count."""
    for colour, (name, layers) in zip(PALETTE, counts.items()):
        pooled = [sum(same) for same in zip(*layers)]
        share = [100 * count / sum(pooled) for count in pooled]
        edges = [number - 0.5 for number in range(len(pooled) + 1)]
        axes.stairs(share, edges, color=colour, linewidth=1.4, label=name)
    axes.set_xlabel("distinct blocks, all layers together")
    axes.set_ylabel("layers of samples, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _moved(table: Table, axes: "Axes") -> None:
    rows = [row for row in table.rows if row.bytes_moved is not None]
    for y, (row, colour) in enumerate(zip(rows, PALETTE)):
        megabytes = (row.bytes_moved or 0.0) / 1e6
        axes.barh(y, megabytes, color=colour, alpha=0.7)
        axes.annotate(f"{megabytes:.3g}", (megabytes, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    cached = table.records[rows[0].name][0]["results"]["retrieval"]["bytes_cached"] / 1e6
    axes.axvline(cached, color=PAPER, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, cached * 1.12)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"MB to move for a chunk, all layers (dashed: {cached:.3g} MB cached)")
    axes.grid(alpha=0.3, axis="x")
