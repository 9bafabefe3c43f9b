"""Distinct blocks that a chunk retrieves, by layer and over all layers (paper, Figure 5), and their bytes."""

from landmark.results.figures.grids import bar_chart, boxes
from landmark.results.figures.marks import Panel, curves, point
from landmark.results.figures.style import Look, colours
from landmark.results.tables import Table

Counts = list[int]  # samples that retrieve 0, 1, 2, … distinct blocks


def panels(table: Table) -> list[list[Panel]]:
    """For each row quartiles, extremes and mean of each layer; all layers together; bytes."""
    counts = {row.name: _layers(table, row.name) for row in table.rows if row.distinct_blocks is not None}
    looks = {name: Look(colour) for name, colour in zip(counts, colours(len(counts)), strict=True)}
    by_layer = [_by_layer(name, layers, looks[name].colour) for name, layers in counts.items()]
    return [by_layer, [_together(counts, looks), _moved(table, looks)]]


def _layers(table: Table, name: str) -> list[Counts]:
    """Of each layer, seeds pooled."""
    found = [record["results"]["retrieval"]["layers"] for record in table.records[name]]
    return [[sum(same) for same in zip(*(layer["distinct_blocks"] for layer in seeds))] for seeds in zip(*found)]


def _by_layer(name: str, layers: list[Counts], colour: str) -> Panel:
    samples = [[number for number, count in enumerate(counts) for _ in range(count)] for counts in layers]
    cached = len(layers[0]) - 1
    x, y = f"layer (dashed: the {cached} blocks cached)", "distinct blocks"
    return boxes(name, samples, colour, x, y, level=cached)


def _together(counts: dict[str, list[Counts]], looks: dict[str, Look]) -> Panel:
    """The paper's picture: each layer of each sample is one count."""
    points = []
    for name, layers in counts.items():
        pooled = [sum(same) for same in zip(*layers)]
        share = [100 * count / sum(pooled) for count in pooled]
        for number, each in enumerate([*share, 0.0]):  # the last closes the histogram
            points.append(point(name, number - 0.5, each, told=f"{name}, {number} distinct blocks"))
    x = {"title": "distinct blocks, all layers together", "axis": {"tickMinStep": 1, "format": "d"}}
    y = {"title": "layers of samples, percent", "scale": {"zero": True}}
    return curves("All layers together", points, looks, x, y, marks="hidden", step=True)


def _moved(table: Table, looks: dict[str, Look]) -> Panel:
    values = {row.name: row.bytes_moved / 1e6 for row in table.rows if row.bytes_moved is not None}
    cached = table.records[next(iter(values))][0]["results"]["retrieval"]["bytes_cached"] / 1e6
    title = f"MB to move for a chunk, all layers (dashed: {cached:.3g} MB cached)"
    return bar_chart("Bytes moved", values, [looks[name].colour for name in values], title, level=cached)
