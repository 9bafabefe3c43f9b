"""Pictures of a table, drawn from its records alone. Which one, the experiment's `figure` says.

Each picture is made of panels, which Vega-Lite describes: here they become PNGs, in the page a browser draws them.
"""

from landmark.results.tables import Table
from landmark.utils.errors import UserError

FIGURES = ("rows", "lines", "heatmap", "accuracy", "drop_rate", "recall", "unique_blocks")


def check_figure(name: str) -> None:
    """Raise UserError where there is no such figure."""
    if name not in FIGURES:
        raise UserError(f"figure={name}: must be one of {', '.join(FIGURES)}")


def draw(table: Table) -> bytes:
    """The picture of a table as a PNG."""
    from landmark.results.figures import drawing  # loads the drawing library

    return drawing.png(table.header, drawing.panels(table))


def draw_positions(table: Table) -> bytes | None:
    """Its curves over positions as a PNG; None where no row has any."""
    from landmark.results.figures import drawing, positions

    return drawing.png(table.header, drawn) if (drawn := positions.panels(table)) else None
