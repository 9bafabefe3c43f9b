"""Perplexity against the share of lookups that the context miss token drops, and which layers drop them (Table 3)."""

import statistics

from landmark.results.columns import TableRow
from landmark.results.figures.marks import LABEL, WIDTH, Panel, Spec, curves, once, point, reference, short
from landmark.results.figures.style import PALETTE, Look, ordered_colours
from landmark.results.tables import Table

LOOKS = {"cutoffs": Look(PALETTE[0])}


def panels(table: Table) -> list[list[Panel]]:
    """Each cutoff's perplexity at the share it drops (dashed: a model without the token); the share by layer."""
    dropping = [row for row in table.rows if row.drop_rate is not None]
    of_all_layers = [row for row in dropping if not (row.cutoff or "").startswith("[")]
    return [[_perplexities(table, dropping), *_layers(table, of_all_layers)]]


def _perplexities(table: Table, rows: list[TableRow]) -> Panel:
    points = [
        point("cutoffs", 100 * (row.drop_rate or 0.0), row.perplexity, told=row.name) | {"label": row.cutoff}
        for row in rows
        if row.perplexity is not None
    ]
    without = [
        each
        for row in table.rows
        if row.drop_rate is None and row.perplexity is not None
        for each in _named_level(row.name, row.perplexity)
    ]
    x = {"title": "lookups dropped, percent (beside each point: its cutoff)", "scale": {"padding": 26}}
    y = {"title": "perplexity", "scale": {"padding": 16}}
    return curves("Perplexity at the share dropped", points, LOOKS, x, y, below=without)


def _layers(table: Table, rows: list[TableRow]) -> list[Panel]:
    """Means over heads and seeds."""
    rows = sorted(rows, key=lambda row: float(row.cutoff or 0))
    if not rows or not table.records:  # from a CSV
        return []
    found = [[record["results"]["memory"]["drop_rates"] for record in table.records[row.name]] for row in rows]
    names = [str(layer) for layer in range(len(found[0][0]))]
    points = [
        point(name, float(row.cutoff or 0), share, told=f"layer {name}, cutoff {row.cutoff}")
        for layer, name in enumerate(names)
        for row, seeds in zip(rows, found, strict=True)
        for share in [100 * statistics.fmean(rate for seed in seeds for rate in seed[layer])]
    ]
    looks = {name: Look(colour) for name, colour in zip(names, ordered_colours(len(names)), strict=True)}
    x, y = {"title": "cutoff"}, {"title": "lookups dropped, percent"}
    return [curves("Share dropped by layer", points, looks, x, y, legend="layer")]


def _named_level(name: str, value: float) -> list[Spec]:
    """A dashed line, with its name above its right end."""
    line = reference(y=value)
    line["encoding"]["tooltip"] = {"value": f"{name}\n{short(value)}"}
    text = LABEL | {"text": name, "align": "right", "baseline": "bottom", "dy": -2}
    return [line, once(text, {"x": {"value": WIDTH - 4}, "y": line["encoding"]["y"]})]
