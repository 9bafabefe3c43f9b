"""Distinct blocks that a chunk retrieves, over all layers (paper, Figure 5)."""

from landmark.results.figures.marks import Panel, curves, point
from landmark.results.figures.style import Look, colours
from landmark.results.tables import Table

Counts = list[int]  # samples that retrieve 0, 1, 2, … distinct blocks


def panels(table: Table) -> list[list[Panel]]:
    """A histogram for each row, as the paper's picture: each layer of each sample is one count."""
    counts = {row.name: _all_layers(table, row.name) for row in table.rows if row.distinct_blocks is not None}
    looks = {name: Look(colour) for name, colour in zip(counts, colours(len(counts)), strict=True)}
    points = []
    for name, pooled in counts.items():
        share = [100 * count / sum(pooled) for count in pooled]
        for number, each in enumerate([*share, 0.0]):  # the last closes the histogram
            points.append(point(name, number - 0.5, each, told=f"{name}, {number} distinct blocks"))
    x = {"title": "distinct blocks, all layers together", "axis": {"tickMinStep": 1, "format": "d"}}
    y = {"title": "layers of samples, percent", "scale": {"zero": True}}
    return [[curves("Distinct blocks of a chunk", points, looks, x, y, marks="hidden", step=True)]]


def _all_layers(table: Table, name: str) -> Counts:
    """Of all layers and seeds."""
    layers = [layer for record in table.records[name] for layer in record["results"]["retrieval"]["layers"]]
    return [sum(same) for same in zip(*(layer["distinct_blocks"] for layer in layers))]
