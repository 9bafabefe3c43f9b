"""Pictures of a table, drawn from its records alone. Which one, the experiment's `figure` says."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from landmark.results.figures import accuracy, drop_rate, heatmap, lines, positions, recall, rows, unique_blocks
from landmark.results.figures.style import COLOURS, png
from landmark.results.tables import Table
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "FIGURES", "check_figure", "draw", "draw_positions"]

FIGURES: "dict[str, Callable[[Table], Figure]]" = {
    "rows": rows.draw,
    "lines": lines.draw,
    "heatmap": heatmap.draw,
    "accuracy": accuracy.draw,
    "drop_rate": drop_rate.draw,
    "recall": recall.draw,
    "unique_blocks": unique_blocks.draw,
}


def check_figure(name: str) -> None:
    """Raise UserError where there is no such figure."""
    if name not in FIGURES:
        raise UserError(f"figure={name}: must be one of {', '.join(FIGURES)}")


def draw(table: Table) -> bytes:
    """The picture of a table as a PNG; a heat map without cells falls back to rows."""
    figure = "rows" if table.figure == "heatmap" and not table.cells else table.figure
    return png(FIGURES[figure](table))


def draw_positions(table: Table) -> bytes | None:
    """Its curves over positions as a PNG; None where no row has any."""
    return png(positions.draw(table)) if positions.curves(table) else None
