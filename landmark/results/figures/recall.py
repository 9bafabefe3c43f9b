"""How often a ranking has the text that was asked for first, and among ten: two points for each row."""

from landmark.results.figures.marks import Panel, beside_names, dot
from landmark.results.figures.style import PALETTE, Look
from landmark.results.tables import Table

LOOKS = {"first": Look(PALETTE[0]), "among the first ten": Look(PALETTE[1], "square")}
SMALLEST = 0.01  # percent, below which the logarithmic axis goes on evenly, to 0


def panels(table: Table) -> list[list[Panel]]:
    """Percent of the texts, with the interval as bars."""
    points = []
    for key, series in zip(("recall_at_1", "recall_at_10"), LOOKS, strict=True):
        for row in table.rows:
            if (share := getattr(row, key)) is not None:
                low, high = getattr(row, f"{key}_interval") or (share, share)
                points.append(dot(series, row.name, 100 * share, (100 * low, 100 * high)))
    x = {
        "title": "texts whose place was found, percent (95 % interval)",
        "scale": {"type": "symlog", "constant": SMALLEST, "domain": [-0.1 * SMALLEST, 100]},
        "axis": {"values": [0, 0.01, 0.1, 1, 10, 100], "format": ".3~r"},
    }
    return [[beside_names("Places found", points, LOOKS, [row.name for row in table.rows], x, apart=True)]]
