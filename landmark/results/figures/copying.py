"""Tokens that find their earlier occurrence: the probe `copy`, whose text is a stretch and the same stretch again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from landmark.results.columns import TableRow
from landmark.results.figures import rows
from landmark.results.figures.grids import square_map
from landmark.results.figures.marks import Panel, around, beside_names, dot
from landmark.results.figures.style import PALETTE, Look
from landmark.results.tables import Table

LOOKS = {"first copy": Look(PALETTE[1], "square"), "second copy": Look(PALETTE[0])}
SHARES = {"attention": "share of attention", "queries": "blocks a token retrieves"}
BY_CHANCE = ("recent", "random")  # scorers that do not look at the text


def panels(table: Table) -> list[list[Panel]]:
    """Maps of the retrieved blocks; the loss on both copies of each row, and perplexities of rows without the probe."""
    copies = [row for row in table.rows if row.second_copy is not None]
    others = [row for row in table.rows if row.second_copy is None]
    measured = [losses(copies)] if copies else []
    if any(row.perplexity is not None for row in others):
        measured.append(rows.absolute(replace(table, rows=others)))
    return [line for line in (_maps(table, copies), measured) if line]


def mapped(table: Table, copies: Sequence[TableRow]) -> list[TableRow]:
    """The row whose map is shown, and beside it one of the same length that retrieves the most recent blocks.

    Of several rows the one with such a neighbour, else the one with the longest text, and of these the best one.
    """
    known = [row for row in copies if _map(table, row)]
    recent = {row.length: row for row in reversed(known) if row.scorer == "recent"}
    looking = [row for row in known if row.scorer not in BY_CHANCE] or known
    if not looking:
        return []
    first = max(looking, key=lambda row: (row.length in recent, row.length, -(row.second_copy or 0.0)))
    second = recent.get(first.length, first)
    return [first] if second is first else [first, second]


def _map(table: Table, row: TableRow) -> dict[str, Any] | None:
    """Of the first seed."""
    return table.records[row.name][0]["results"].get("copy_map")


def _maps(table: Table, copies: Sequence[TableRow]) -> list[Panel]:
    """One scale of colours for all maps."""
    shown = [(row, found) for row in mapped(table, copies) if (found := _map(table, row))]
    highest = max((value for _, found in shown for line in found["best"] for value in line), default=0.0)
    made = []
    for row, found in shown:
        half = row.length // 2
        note = f"layer {found['layer']}, head {found['head']}; the text is repeated from token {half:,} on"
        if found["found"] is not None:
            share = f"{100 * found['found']:.0f} %"
            note += f"; from the next chunk on {share} of the tokens find their earlier occurrence"
        made.append(
            square_map(
                f"Which blocks the tokens retrieve: {row.name}",
                found["best"],
                found["cell"],
                row.length,
                ("position of the token", "position of the block retrieved", SHARES[found["share_of"]]),
                highest=highest,
                marked=half,
                note=note,
            )
        )
    return made


def losses(copies: Sequence[TableRow]) -> Panel:
    """Loss on the first and the second copy of the text of each row with the probe."""
    points = [
        dot(series, row.name, value, around(value, error))
        for row in copies
        for series, value, error in zip(
            LOOKS, (row.first_copy, row.second_copy), (row.first_copy_spread, row.second_copy_spread), strict=True
        )
        if value is not None
    ]
    names = [row.name for row in copies]
    x = {"title": "loss, nats a token (lower is better)"}
    return beside_names("Loss on a text, and when it is repeated", points, LOOKS, names, x, apart=True)
