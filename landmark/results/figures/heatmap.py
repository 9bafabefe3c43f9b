"""Perplexity over the two axes of a grid of rows, and against the keys attended, beside the other rows."""

from landmark.results.figures.grids import heat_map
from landmark.results.figures.marks import Panel, curves, point
from landmark.results.figures.style import COLOURS, INK, SHAPES, Look, ordered_colours
from landmark.results.tables import Table


def panels(table: Table) -> list[list[Panel]]:
    """The grid, the values of its first axis upwards; every row, the grid's joined along its second axis."""
    rows = {row.name: row for row in table.rows}
    axes = list(next(iter(table.cells.values())))
    cells, grid = {}, {}
    for name, cell in table.cells.items():
        first, second = cell.values()
        cells[first, second] = rows[name].perplexity if name in rows else None
        same = grid.setdefault(f"{axes[0].rpartition('.')[2]} = {first}", [])
        same += [rows[name]] if name in rows else []
    looks = {name: Look(colour) for name, colour in zip(grid, ordered_colours(len(grid)), strict=True)}
    others = [row for row in table.rows if row.name not in table.cells]
    for number, row in enumerate(others):
        looks[row.name] = Look(COLOURS.get(row.model, INK), SHAPES[1 + number % (len(SHAPES) - 1)])
    points = [
        point(name, row.keys_attended, row.perplexity, told=row.name)
        for name, same in [*grid.items(), *((row.name, [row]) for row in others)]
        for row in same
        if row.keys_attended is not None and row.perplexity is not None
    ]
    x, y = {"title": "keys attended, mean over queries"}, {"title": "perplexity"}
    against_keys = curves("Perplexity against keys attended", points, looks, x, y, joined=grid)
    return [[heat_map("Perplexity", axes, cells), against_keys]]
