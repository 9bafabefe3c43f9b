"""What page.js draws, as plain values: lines, dots beside names, and heat maps.

A point of a line is [x, y, low, high], one of dots [number of the name, value, low, high]; without an error the last
two are the value itself. Colours and marks are numbers that page.js has a look for.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from landmark.results.figures.style import COLOURS, PALETTE, series_colours
from landmark.results.tables import Table, TableRow

Chart = dict[str, Any]


def lines(title: str, x: Chart, y: Chart, drawn: Sequence[Chart]) -> Chart:
    """Axes have a title, and may have a scale (log, symlog with its threshold), zero: true, a range, and a top: values
    above it leave the picture."""
    return {"kind": "lines", "title": title, "x": x, "y": y, "series": [each for each in drawn if each["points"]]}


def dots(title: str, x: str, names: Sequence[str], drawn: Sequence[Chart]) -> Chart:
    """Values along x, a line of names for each."""
    return {"kind": "dots", "title": title, "x": {"title": x}, "names": list(names), "series": list(drawn)}


def heat(title: str, axes: Sequence[str], values: Sequence[Sequence[str]], cells: Any, digits: int = 3) -> Chart:
    """cells: a list for each value of the first axis, which goes up; None where there is none."""
    axis = [{"title": name, "values": list(each)} for name, each in zip(axes, values, strict=True)]
    return {"kind": "heat", "title": title, "y": axis[0], "x": axis[1], "cells": cells, "digits": digits}


def line(
    name: str,
    points: Iterable[tuple[float, Any]],
    number: int,
    *,
    mark: int | None = None,
    dash: bool = False,
    marks: bool = True,
) -> Chart:
    """One of several lines, the `number`th; points are (x, y), left out where y is None."""
    drawn = [[x, *around(y)] for x, y in points if y is not None]
    look = {"colour": number, "mark": (number if mark is None else mark) if marks else None, "line": True, "dash": dash}
    return {"name": name, "points": drawn} | look


def looks(found: dict[str, list[TableRow]]) -> dict[str, Chart]:
    """Of series: the colour of its model for the first of each, as in the other pictures."""
    colours = series_colours(found)
    return {
        name: {"name": name, "colour": PALETTE.index(colours[name]), "mark": number, "line": True}
        for number, name in enumerate(found)
    }


def by_model(table: Table, value: Callable[[TableRow], list[float] | None]) -> list[Chart]:
    """Dots of every row that has a value, a series for each kind of model."""
    drawn = []
    for model, colour in COLOURS.items():
        points = [[y, *bars] for y, row in enumerate(table.rows) if row.model == model and (bars := value(row))]
        if points:
            name = model.replace("_", "-")
            drawn.append({"name": name, "points": points, "colour": PALETTE.index(colour), "mark": 0})
    return drawn


def change(row: TableRow, base: TableRow) -> list[float]:
    """Percent of perplexity against the first row, by the paired difference where there is one."""
    if row.difference is None or row.difference_error is None or row.against != base.name:
        return around(percent(row.perplexity, base.perplexity))
    return around(100 * math.expm1(row.difference), 100 * math.exp(row.difference) * row.difference_error)


def percent(value: float | None, base: float | None) -> float:
    """Change of a value from another."""
    return 100 * ((value or math.nan) / (base or math.nan) - 1)


def around(value: float | None, error: float | None = None) -> list[float]:
    """A value, and the ends of its error bar."""
    middle, error = value or 0.0, error or 0.0
    return [middle, middle - error, middle + error]
