"""Perplexity against the share of lookups that the context miss token drops, and which layers drop them (Table 3)."""

from typing import TYPE_CHECKING

from landmark.results.figures.style import PALETTE, PAPER, colours, new_figure
from landmark.results.tables import Table, TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(table: Table) -> "Figure":
    """Left: each cutoff's perplexity at what it drops, one cutoff for all layers or one for each; dashed: a model
    without the token. Right: what every layer drops, by cutoff."""
    figure = new_figure(table, 11, 4.6)
    left, right = figure.subplots(1, 2)
    dropping = [row for row in table.rows if row.drop_rate is not None]
    _perplexities(table, [row for row in dropping if row.perplexity is not None], left)
    _layers(table, [row for row in dropping if not _chosen(row)], right)
    for panel, title in ((left, None), (right, "layer")):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, title=title)
    return figure


def _chosen(row: TableRow) -> bool:
    """Whether each layer has a cutoff of its own."""
    return (row.cutoff or "").startswith("[")


def _perplexities(table: Table, rows: list[TableRow], axes: "Axes") -> None:
    kinds = (
        ("one cutoff for all layers", [row for row in rows if not _chosen(row)], "o-", PALETTE[0]),
        ("one for each layer, chosen on validation", [row for row in rows if _chosen(row)], "D", PALETTE[1]),
    )
    for label, points, look, colour in kinds:
        if points:
            points = sorted(points, key=lambda row: row.drop_rate or 0.0)
            x = [100 * (row.drop_rate or 0.0) for row in points]
            axes.plot(x, [row.perplexity or 0.0 for row in points], look, color=colour, markersize=5, label=label)
    for row in rows:
        if not _chosen(row):
            at = (100 * (row.drop_rate or 0.0), row.perplexity or 0.0)
            axes.annotate(row.cutoff or "", at, (0, 6), textcoords="offset points", fontsize=7, ha="right")
    for row in table.rows:
        if row.drop_rate is None and row.perplexity is not None:
            axes.axhline(row.perplexity, color=PAPER, linewidth=1, linestyle="--", label=row.name)
    axes.set_xlabel("lookups dropped, percent (beside each point: its cutoff)")
    axes.set_ylabel("perplexity")


def _layers(table: Table, rows: list[TableRow], axes: "Axes") -> None:
    """Means over heads and seeds."""
    rows = sorted(rows, key=lambda row: float(row.cutoff or 0))
    found = [[record["results"]["memory"]["drop_rates"] for record in table.records[row.name]] for row in rows]
    layers = len(found[0][0]) if found else 0
    for layer, colour in enumerate(colours(layers)):
        rates = [[rate for seed in seeds for rate in seed[layer]] for seeds in found]
        percent = [100 * sum(each) / len(each) for each in rates]
        axes.plot([float(row.cutoff or 0) for row in rows], percent, "o-", color=colour, markersize=4, label=f"{layer}")
    axes.set_xlabel("cutoff")
    axes.set_ylabel("lookups dropped, percent")
