"""The differences of rows here against the same differences in the paper."""

from collections.abc import Mapping

from landmark.results.figures.marks import Panel, curves, point, reference
from landmark.results.figures.rows import change, percent
from landmark.results.figures.style import SHAPES, Look, colours
from landmark.results.tables import Table


def panel(tables: Mapping[str, Table]) -> Panel | None:
    """Each row's change of perplexity from its table's first row, in the paper and here. On the diagonal both agree.

    tables: by their titles. None where no row stands in the paper.
    """
    points = []
    for title, table in tables.items():
        base = table.rows[0]
        for row in table.rows[1:]:
            if row.paper is not None and base.paper is not None and row.perplexity is not None:
                value, bar = change(row, base)
                points.append(point(title, percent(row.paper, base.paper), value, bar, f"{title}, {row.name}"))
    if not points:
        return None
    names = list(dict.fromkeys(each["series"] for each in points))
    looks = {
        name: Look(colour, SHAPES[number % len(SHAPES)])
        for number, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True))
    }
    across, up = ([each[axis] for each in points] for axis in "xy")
    low, high = max(min(across), min(up)), min(max(across), max(up))
    diagonal = reference(x=low, y=low, x2=high, y2=high)
    y = {"title": "the same, measured here, percent"}
    x = {"title": "perplexity against the table's first row in the paper, percent"}
    return curves("Ours against the paper's", points, looks, x, y, joined=(), below=[diagonal])
