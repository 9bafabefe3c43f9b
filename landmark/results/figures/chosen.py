"""The panels that an experiment's file lists (`panels`): a few series of rows each, named in words."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from landmark.config.schema import PanelConfig
from landmark.results.columns import TableRow
from landmark.results.figures.copying import losses
from landmark.results.figures.marks import Interval, Panel, around, beside_names, curves, dot, point, reference
from landmark.results.figures.rows import change
from landmark.results.figures.style import COLOURS, INK, Look, length_axis, percent, series_looks
from landmark.results.tables import Table

_ACROSS = 2  # panels of a line
Value = tuple[float, Interval]
Series = dict[str, list[tuple[TableRow, Value]]]


def panels(table: Table) -> list[list[Panel]]:
    """Each panel that has rows: against the length or, where no series has several lengths, beside their names."""
    found = {title: _series(table, asked) for title, asked in table.panels.items()}
    looks = series_looks({name: rows[0][0].model for series in found.values() for name, rows in series.items()})
    drawn = []
    for title, series in found.items():
        value, rows = table.panels[title].value, [row for each in series.values() for row, _ in each]
        if rows and value == "copies":
            named = [replace(each[0][0], name=name) for name, each in series.items()]
            drawn.append(replace(losses(named), title=title))
        elif rows:
            shown = (
                _against_length
                if any(len({row.length for row, _ in each}) > 1 for each in series.values())
                else _beside
            )
            drawn.append(shown(title, series, looks, _axis(table, value, series), value == "difference"))
    return [drawn[start : start + _ACROSS] for start in range(0, len(drawn), _ACROSS)]


def _series(table: Table, asked: PanelConfig) -> Series:
    """Rows that have the value, shortest first; a series has one pattern of names or several."""
    known = [(row, value) for row in table.rows if (value := _VALUES[asked.value](table, row)) is not None]
    found = {}
    for name, patterns in asked.series.items():
        fitting = [each for each in known if any(fnmatchcase(each[0].name, one) for one in patterns.split())]
        if fitting:
            found[name] = sorted(fitting, key=lambda each: each[0].length)
    return found


def _against_length(title: str, series: Series, looks: dict[str, Look], y: dict[str, Any], from_zero: bool) -> Panel:
    points = []
    for number, (name, rows) in enumerate(series.items()):
        shift = 2 ** (0.04 * (number - (len(series) - 1) / 2))  # so that error bars stand side by side
        points += [point(name, row.length * shift, *value, told=row.name) for row, value in rows]
    x = length_axis([row.length for rows in series.values() for row, _ in rows])
    return curves(
        title, points, {name: looks[name] for name in series}, x, y, below=[reference(y=0)] if from_zero else []
    )


def _beside(title: str, series: Series, _: dict[str, Look], x: dict[str, Any], from_zero: bool) -> Panel:
    """A colour for each kind of model."""
    shown = {name: rows[0] for name, rows in series.items()}
    points = [dot(row.model, name, *value) for name, (row, value) in shown.items()]
    kinds = {row.model: Look(COLOURS.get(row.model, INK)) for row, _ in shown.values()}
    return beside_names(title, points, kinds, list(shown), x, below=[reference(x=0)] if from_zero else [])


def _axis(table: Table, value: str, series: Series) -> dict[str, Any]:
    spread = "error" if table.seeds == 1 else "deviation over seeds"
    if value == "percent":
        bars = " (95 % interval)" if table.seeds == 1 else ""
        return {"title": f"percent{bars}", "scale": {"domain": [-4, 104], "nice": False}}
    if value == "difference":
        bases = {row.against for rows in series.values() for row, _ in rows if row.against}
        words = [name for name, rows in series.items() if bases & {row.name for row, _ in rows}]
        named = words or (bases if len(bases) == 1 else {"the first row of its length"})
        return {"title": f"perplexity against {next(iter(named))}, percent (± paired error)"}
    return {"title": f"perplexity (± standard {spread})"}


def _percent(_: Table, row: TableRow) -> Value | None:
    value, low, high = percent(row)
    return None if value is None else (value, (low, high))


def _perplexity(_: Table, row: TableRow) -> Value | None:
    """None for probes: their text is another."""
    if row.perplexity is None or row.second_copy is not None or row.recall is not None:
        return None
    return row.perplexity, around(row.perplexity, row.spread)


def _second_copy(_: Table, row: TableRow) -> Value | None:
    return None if row.second_copy is None else (row.second_copy, around(row.second_copy, row.second_copy_spread))


def _difference(table: Table, row: TableRow) -> Value | None:
    """Percent of perplexity from the row that the table compares it with; 0 for such a row itself."""
    others = {each.name: each for each in table.rows}
    if row.against in others:
        return change(row, others[row.against])
    return (0.0, (0.0, 0.0)) if row.name in {each.against for each in table.rows} else None


_VALUES: dict[str, Callable[[Table, TableRow], Value | None]] = {
    "perplexity": _perplexity,
    "difference": _difference,
    "percent": _percent,
    "copies": _second_copy,
}
