"""The panels that an experiment's file lists (`panels`): a few series of rows each, named in words."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

from landmark.config.schema import PanelConfig
from landmark.results.columns import TableRow
from landmark.results.figures.copying import losses
from landmark.results.figures.marks import Interval, Panel, around, beside_names, curves, dot, point, reference
from landmark.results.figures.rows import change
from landmark.results.figures.style import COLOURS, INK, Look, length_axis, percent, series_looks
from landmark.results.tables import Table

_ACROSS = 2  # panels of a line
Series = dict[str, list[TableRow]]


def panels(table: Table) -> list[list[Panel]]:
    """Each panel that has rows: against the length or, where no series has several lengths, beside their names."""
    found = {title: _series(table, asked) for title, asked in table.panels.items()}
    models = {name: rows[0].model for series in found.values() for name, rows in series.items()}
    looks = series_looks(models)
    drawn = [_panel(table, title, table.panels[title].value, each, looks) for title, each in found.items() if each]
    return [drawn[start : start + _ACROSS] for start in range(0, len(drawn), _ACROSS)]


def _series(table: Table, asked: PanelConfig) -> Series:
    """Rows of each series, shortest first; a series has one pattern of names or several."""
    known = [row for row in table.rows if _value(table, row, asked.value)[0] is not None]
    found = {
        name: sorted((row for row in known if _fits(row, patterns)), key=lambda row: row.length)
        for name, patterns in asked.series.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _fits(row: TableRow, patterns: str) -> bool:
    return any(fnmatchcase(row.name, pattern) for pattern in patterns.split())


def _panel(table: Table, title: str, value: str, series: Series, looks: dict[str, Look]) -> Panel:
    if value == "copies":
        return replace(losses([replace(rows[0], name=name) for name, rows in series.items()]), title=title)
    axis = _axis(table, value, series)
    below = [reference(**{"y" if _has_lengths(series) else "x": 0})] if value == "difference" else []
    if not _has_lengths(series):
        points = [
            dot(row.model, name, *_measured(table, row, value)) for name, rows in series.items() for row in rows[:1]
        ]
        kinds = {rows[0].model: Look(COLOURS.get(rows[0].model, INK)) for rows in series.values()}
        return beside_names(title, points, kinds, list(series), axis, below=below)
    points = []
    for number, (name, rows) in enumerate(series.items()):
        shift = 2 ** (0.04 * (number - (len(series) - 1) / 2))  # so that error bars stand side by side
        points += [point(name, row.length * shift, *_measured(table, row, value), row.name) for row in rows]
    shown = {name: looks[name] for name in series}
    x = length_axis([row.length for rows in series.values() for row in rows])
    return curves(title, points, shown, x, axis, below=below)


def _has_lengths(series: Series) -> bool:
    return any(len({row.length for row in rows}) > 1 for rows in series.values())


def _axis(table: Table, value: str, series: Series) -> dict:
    spread = "error" if table.seeds == 1 else "deviation over seeds"
    if value == "percent":
        bars = " (95 % interval)" if table.seeds == 1 else ""
        return {"title": f"percent{bars}", "scale": {"domain": [-4, 104], "nice": False}}
    if value == "difference":
        bases = {row.against for rows in series.values() for row in rows if row.against}
        words = [name for name, rows in series.items() if bases & {row.name for row in rows}]
        base = words[0] if words else min(bases, default="the first row")
        return {"title": f"perplexity against {base}, percent (± paired error)"}
    return {"title": f"perplexity (± standard {spread})"}


def _measured(table: Table, row: TableRow, value: str) -> tuple[float, Interval]:
    number, interval = _value(table, row, value)
    if number is None:
        raise TypeError(f"{row.name} has no {value}")
    return number, interval


def _value(table: Table, row: TableRow, value: str) -> tuple[float | None, Interval]:
    return _VALUES[value](table, row)


def _percent(_: Table, row: TableRow) -> tuple[float | None, Interval]:
    number, *interval = percent(row)
    return number, (interval[0], interval[1])


def _perplexity(_: Table, row: TableRow) -> tuple[float | None, Interval]:
    """None for probes: their text is another."""
    if row.perplexity is None or row.second_copy is not None or row.recall is not None:
        return None, (None, None)
    return row.perplexity, around(row.perplexity, row.spread)


def _copies(_: Table, row: TableRow) -> tuple[float | None, Interval]:
    return row.second_copy, (None, None)


def _difference(table: Table, row: TableRow) -> tuple[float | None, Interval]:
    """Percent of perplexity from the row that the table compares it with; 0 for such a row itself."""
    others = {each.name: each for each in table.rows}
    if row.name in {each.against for each in table.rows}:
        return 0.0, (0.0, 0.0)
    return (None, (None, None)) if row.against not in others else change(row, others[row.against])


_VALUES: dict[str, Callable[[Table, TableRow], tuple[float | None, Interval]]] = {
    "perplexity": _perplexity,
    "difference": _difference,
    "percent": _percent,
    "copies": _copies,
}
