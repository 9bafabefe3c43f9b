"""Perplexity over the two axes of a grid of rows, and against the keys attended, beside the other rows."""

import math
from typing import TYPE_CHECKING, Any

from landmark.results.figures.style import COLOURS, new_figure
from landmark.results.tables import Table, TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = dict[tuple[str, ...], TableRow]  # by the values on both axes
COLOUR_MAP = "viridis_r"  # dark is a high perplexity


def draw(table: Table) -> "Figure":
    """Left: the grid, the values of its first axis upwards. Right: every row, the grid's joined along its second."""
    rows = {(*table.cells[row.name].values(),): row for row in table.rows if row.name in table.cells}
    keys = list(next(iter(table.cells.values())))
    values = [list(dict.fromkeys(cell[key] for cell in table.cells.values())) for key in keys]
    figure = new_figure(table, 11, 4.6)
    left, right = figure.subplots(1, 2)
    _cells(rows, keys, values, left)
    _against_keys(table, rows, keys, values, right)
    return figure


def _cells(rows: Cells, keys: list[str], values: list[list[str]], axes: "Axes") -> None:
    grid = [[_perplexity(rows.get((a, b))) for b in values[1]] for a in values[0]]
    known = [value for line in grid for value in line if not math.isnan(value)]
    image = axes.imshow(grid, cmap=COLOUR_MAP, origin="lower", aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            missing = math.isnan(value)
            dark = not missing and value > (min(known) + max(known)) / 2
            text = "missing" if missing else f"{value:.3f}" if value < 100 else f"{value:.1f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_yticks(range(len(values[0])), values[0])
    axes.set_xticks(range(len(values[1])), values[1])
    axes.set_ylabel(keys[0])
    axes.set_xlabel(keys[1])
    if known:
        axes.figure.colorbar(image, ax=axes)
    axes.set_title("perplexity", fontsize=9)


def _against_keys(table: Table, rows: Cells, keys: list[str], values: list[list[str]], axes: "Axes") -> None:
    from matplotlib import colormaps

    name = keys[0].rpartition(".")[2]
    for number, first in enumerate(values[0]):
        line = [row for second in values[1] if (row := rows.get((first, second))) is not None]
        _points(axes, line, f"{name} = {first}", colormaps["plasma"](0.85 * number / max(1, len(values[0]) - 1)), "o-")
    for row, marker in zip([row for row in table.rows if row.name not in table.cells], "sD^vP*X" * len(table.rows)):
        _points(axes, [row], row.name, COLOURS.get(row.model, "black"), marker)
    axes.set_xlabel("keys attended, mean over queries")
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _points(axes: "Axes", rows: list[TableRow], label: str, colour: Any, form: str) -> None:
    x, y = [row.keys_attended or math.nan for row in rows], [_perplexity(row) for row in rows]
    axes.plot(x, y, form, color=colour, markersize=5, linewidth=1.2, label=label)


def _perplexity(row: TableRow | None) -> float:
    return math.nan if row is None or row.perplexity is None else row.perplexity
