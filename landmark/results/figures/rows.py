"""Perplexities of rows with their errors, and how the rows compare, here and in the paper."""

import math

from landmark.results.columns import TableRow
from landmark.results.figures.grids import heat_map
from landmark.results.figures.marks import Panel, around, beside_names, dot, reference
from landmark.results.figures.style import COLOURS, CROSS, INK, Look
from landmark.results.tables import Table


def panels(table: Table) -> list[list[Panel]]:
    """Perplexity of each row, or a grid of the granularities; its distance from the first row, beside the paper's."""
    return [[*(_granularities(table) or [absolute(table)]), *_relative(table)]]


def change(row: TableRow, base: TableRow) -> tuple[float, tuple[float, float]]:
    """Percent of perplexity against another row, by the paired difference where there is one, and its error bar."""
    if row.difference is None or row.difference_error is None or row.against != base.name:
        value, error = percent(row.perplexity, base.perplexity), 0.0
    else:
        value, error = 100 * math.expm1(row.difference), 100 * math.exp(row.difference) * row.difference_error
    return value, around(value, error)


def percent(value: float | None, base: float | None) -> float:
    """Change of a value from another."""
    return 100 * ((value or math.nan) / (base or math.nan) - 1)


def absolute(table: Table) -> Panel:
    """Perplexity of each row, with its error."""
    measured = [(row, row.perplexity) for row in table.rows if row.perplexity is not None]
    points = [dot(_kind(row), row.name, value, around(value, row.spread)) for row, value in measured]
    x = {"title": "perplexity (lower is better)"}
    return beside_names("Perplexity, measured here", points, _looks(table), _names(table), x)


def _relative(table: Table) -> list[Panel]:
    """Ours with the standard error of the paired difference; nothing where the first row has no record yet."""
    base, looks = table.rows[0], _looks(table)
    is_base = not table.is_partial or base.name == table.asked[0]
    if len(table.rows) == 1 or base.perplexity is None or not is_base:
        return []
    points = [dot(_kind(row), row.name, *change(row, base)) for row in table.rows if row.perplexity is not None]
    for label, look in (("paper", Look(INK, "square", filled=False)), ("poster", Look(INK, CROSS, filled=False))):
        first = getattr(base, label)
        printed = {row.name: value for row in table.rows if (value := getattr(row, label)) is not None}
        if first is not None and printed:
            points += [dot(label, name, percent(value, first)) for name, value in printed.items()]
            looks[label] = look
    x = {"title": "percent (± paired standard error)"}
    return [
        beside_names(
            f"Perplexity against {base.name}", points, looks, _names(table), x, below=[reference(x=0, dashed=False)]
        )
    ]


def _granularities(table: Table) -> list[Panel]:
    """Where the same settings were evaluated with several granularities."""
    where = {row.name: f"{row.length:,} tokens, k = {row.k}" for row in table.rows if row.granularity}
    found = {(row.granularity or "", where[row.name]): row.perplexity for row in table.rows if row.name in where}
    granularities = {granularity for granularity, _ in found}
    if len(granularities) < 2 or len(found) < len(where) or not all(found.values()):
        return []
    return [heat_map("Perplexity by granularity", ("granularity", ""), found)]


def _looks(table: Table) -> dict[str, Look]:
    """A colour for each kind of model."""
    kinds = {row.model for row in table.rows}
    return {
        kind.replace("_", "-"): Look(COLOURS.get(kind, INK)) for kind in sorted(kinds, key=[*COLOURS, *kinds].index)
    }


def _kind(row: TableRow) -> str:
    return row.model.replace("_", "-")


def _names(table: Table) -> list[str]:
    return [row.name for row in table.rows]
