"""Pictures of a table, drawn from its records alone. Which one, the experiment's `figure` says.

Each picture is made of panels, which Vega-Lite describes: here they become PNGs, in the page a browser draws them.
"""

from collections.abc import Callable

from landmark.results.figures import (
    accuracy,
    chosen,
    copying,
    drop_rate,
    heatmap,
    lines,
    positions,
    recall,
    rows,
    tasks,
    unique_blocks,
    widths,
)
from landmark.results.figures.drawing import png
from landmark.results.figures.marks import Panel
from landmark.results.tables import Table
from landmark.utils.errors import UserError

FIGURES: dict[str, Callable[[Table], list[list[Panel]]]] = {
    "rows": rows.panels,
    "lines": lines.panels,
    "heatmap": heatmap.panels,
    "accuracy": accuracy.panels,
    "copying": copying.panels,
    "drop_rate": drop_rate.panels,
    "recall": recall.panels,
    "tasks": tasks.panels,
    "unique_blocks": unique_blocks.panels,
    "widths": widths.panels,
}


def check_figure(name: str) -> None:
    """Raise UserError where there is no such figure."""
    if name not in FIGURES:
        raise UserError(f"figure={name}: must be one of {', '.join(FIGURES)}")


def panels(table: Table) -> list[list[Panel]]:
    """Lines of panels: those that the experiment lists and that have rows, else what the table's `figure` shows.

    A heat map without cells falls back to rows.
    """
    if table.panels and (drawn := chosen.panels(table)):
        return drawn
    return FIGURES["rows" if table.figure == "heatmap" and not table.cells else table.figure](table)


def draw(table: Table) -> bytes:
    """The picture of a table as a PNG."""
    return png(table.header, panels(table))


def draw_positions(table: Table) -> bytes | None:
    """Its curves over positions as a PNG; None where no row has any."""
    return png(table.header, drawn) if (drawn := positions.panels(table)) else None
