"""Pictures of a table, lines of panels, from its records: which, the experiment's `panels` or its `figure` says."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import cycle
from typing import Any

from landmark.experiment.results import charts
from landmark.experiment.results.charts import COLOURS, INK, PALETTE, Interval, Look, Options, Panel, Point
from landmark.experiment.results.columns import TableRow
from landmark.experiment.results.tables import Table

FAR, FAR_PERCENT = 1.3, 30.0  # perplexities above this many medians, and changes above it, leave the picture
BY_CHANCE = ("recent", "random")  # scorers that do not look at the text
SHARES = {"attention": "share of attention", "queries": "blocks a token retrieves"}
KINDS = {  # kinds of measurement: title of their panel, and the values that panels show, as in `PanelConfig`
    "text": ("Perplexity", "perplexity", "difference"),
    "hidden": ("Perplexity of hidden tokens", "perplexity", "difference"),
    "copies": ("Loss on a text, and when it is repeated", "copies"),
    "answers": ("Prompts answered", "percent"),
}
COPIES = {"first copy": "first_copy", "second copy": "second_copy"}  # words for the legend, and columns
PRINTED = {"paper": Look(INK, "square", filled=False), "poster": Look(INK, charts.CROSS, filled=False)}
Value = tuple[float, Interval]
Lines = list[list[Panel]]
Series = Mapping[str, Sequence[TableRow]]


def panels(table: Table) -> Lines:
    """The panels that the experiment lists and that have rows, and a histogram if it has one, else what the table's
    `figure` shows, else its rows.
    """
    listed = _listed(table)
    if listed and table.figure != "unique_blocks":
        return listed
    return [*listed, *FIGURES[table.figure](table)] or _rows(table)


def draw(table: Table) -> bytes:
    """The picture of a table as a PNG."""
    return charts.png(table.header, panels(table))


def percent(value: float | None, base: float | None) -> float:
    """Change of a value from another."""
    return 100 * ((value or math.nan) / (base or math.nan) - 1)


def change(row: TableRow, base: TableRow) -> tuple[float, tuple[float, float]]:
    """Percent of perplexity against another row, by the paired difference where there is one, and its error bar."""
    if row.difference is None or row.difference_error is None or row.against != base.name:
        value, error = percent(row.perplexity, base.perplexity), 0.0
    else:
        value, error = 100 * math.expm1(row.difference), 100 * math.exp(row.difference) * row.difference_error
    return value, charts.around(value, error)


# ---- panels of series of rows: against the length, or beside their names


def _rows(table: Table) -> Lines:
    """A line of panels for each kind of measurement, of all rows; above them maps of the retrieved blocks."""
    drawn = [_maps(table)]
    for part, title, value, *more in _kinds(table):
        rows, base = {row.name: [row] for row in part.rows}, part.rows[0].name
        if table.is_partial and base != table.asked[0]:
            more = []  # without the experiment's first row another would silently take its place
        made = [_panel(part, title, value, rows), *(_panel(part, f"{title} against {base}", v, rows) for v in more)]
        drawn.append([panel for panel in made if panel])
    return [line for line in drawn if line]


def _lines(table: Table, *, by_task: bool = False) -> Lines:
    """Panels against the length: rows that differ in it are a series. by_task: one each, of `task-series_length`."""
    drawn: Lines = []
    for part, title, value, *more in _kinds(table):
        found: dict[str, dict[str, list[TableRow]]] = {}
        for row in part.rows:
            task, _, name = row.series.partition("-") if by_task else (title, "", row.series)
            found.setdefault(task, {}).setdefault(name, []).append(row)
        looks, lengths = _looks(found.values()), [row.length for row in part.rows]
        shown = [(task, value, series) for task, series in found.items()]
        shown += [("Difference at the same length", each, series) for each in more for series in found.values()]
        drawn += _two_across(_panel(part, *each, looks, lengths) for each in shown)
    return drawn


def _listed(table: Table) -> Lines:
    """The panels of the experiment's file: a few series each, named in words, of rows by patterns of their names."""
    found: dict[str, Series] = {}
    for title, panel in table.panels.items():
        fitting = {
            name: [row for row in table.rows if any(fnmatchcase(row.name, one) for one in patterns.split())]
            for name, patterns in panel.series.items()
        }
        found[title] = {name: rows for name, rows in fitting.items() if rows}
    looks = _looks(found.values())
    return _two_across(_panel(table, title, table.panels[title].value, each, looks) for title, each in found.items())


def _kinds(table: Table) -> list[tuple[Any, ...]]:
    """For each kind of measurement its rows, the title of their panel and the values to show."""
    kinds = dict.fromkeys(row.measured for row in table.rows)
    parts = {kind: replace(table, rows=[row for row in table.rows if row.measured == kind]) for kind in kinds}
    return [(part, *KINDS[kind]) for kind, part in parts.items()]


def _two_across(drawn: Iterable[Panel | None]) -> Lines:
    shown = [panel for panel in drawn if panel]
    return [shown[start : start + 2] for start in range(0, len(shown), 2)]


def _looks(panels: Iterable[Series]) -> dict[str, Look]:
    """The same for a series in all panels; the model of its first row decides it."""
    models: dict[str, str] = {}
    for series in panels:
        for name, rows in series.items():
            models.setdefault(name, rows[0].model)
    return charts.series_looks(models)


def _panel(
    table: Table,
    title: str,
    value: str,
    series: Series,
    looks: Mapping[str, Look] | None = None,
    lengths: Sequence[int] = (),
) -> Panel | None:
    """The series that have a value: with looks against several lengths, else beside their names."""
    valued = {name: [(row, bar) for row in rows if (bar := _value(table, row, value))] for name, rows in series.items()}
    found = {name: sorted(rows, key=lambda each: each[0].length) for name, rows in valued.items() if rows}
    if not found:
        return None
    axis: Options = {"title": _measured(table, value, found)}
    if value == "copies":
        named = {name if len(rows) == 1 else row.name: row for name, rows in found.items() for row, _ in rows}
        return _copies(title, named, axis)
    lengths_shown = [{row.length for row, _ in rows} for rows in found.values()]
    if looks is None or max(map(len, [set(lengths), *lengths_shown])) == 1:
        return _beside(table, title, value, {name: rows[0] for name, rows in found.items()}, axis)
    points: list[Point] = []
    ends: dict[str, list[float]] = {}
    for number, (name, rows) in enumerate(found.items()):
        shift = 2 ** (0.04 * (number - (len(found) - 1) / 2))  # so that error bars stand side by side
        for row, bar in rows:
            points.append(charts.point(name, row.length * shift, *bar))
            ends[row.name] = [points[-1]["low"], points[-1]["high"]]
    axis["scale"], note = {"domain": [-4, 104]}, ""
    if value != "percent":
        highest = FAR * statistics.median(point["y"] for point in points) if value == "perplexity" else FAR_PERCENT
        axis["scale"], note = charts.frame(ends, highest)
    x = charts.length_axis(lengths or [length for each in lengths_shown for length in each])
    zero = [charts.reference(y=0)] if value == "difference" else []
    own = {name: look for name, look in looks.items() if name in found}
    return charts.curves(title, points, own, x, axis, below=zero, note=note)


def _value(table: Table, row: TableRow, value: str) -> Value | None:
    """A value of a row with the ends of its error bar; None where it has none."""
    if value == "copies":
        return None if row.second_copy is None else (row.second_copy, (None, None))
    if value == "percent":
        share, low, high = row.accuracy, row.accuracy_low, row.accuracy_high
        ends = [None if each is None else 100 * each for each in (low, high)]
        return None if share is None else (100 * share, (ends[0], ends[1]))
    if row.perplexity is None or row.measured == "copies":  # probes, whose text is another
        return None
    if value == "perplexity":
        return row.perplexity, charts.around(row.perplexity, row.spread)
    others = {each.name: each for each in table.rows}
    if row.against in others:
        return change(row, others[row.against])
    return (0.0, (0.0, 0.0)) if row.name in {each.against for each in table.rows} else None


def _measured(table: Table, value: str, found: Mapping[str, Sequence[tuple[TableRow, Value]]]) -> str:
    """Title of the axis of a value."""
    if value == "difference":
        bases = {row.against for rows in found.values() for row, _ in rows if row.against}
        words = [name for name, rows in found.items() if bases & {row.name for row, _ in rows}]
        named = words or (bases if len(bases) == 1 else {"the first row of its length"})
        return f"perplexity against {next(iter(named))}, percent (± paired error)"
    seeds = {row.seeds for rows in found.values() for row, _ in rows}
    over = "" if table.seeds == 1 else " over seeds" if min(seeds) > 1 else " over seeds, of one seed over the text"
    return {
        "perplexity": f"perplexity (± standard error{over})",
        "percent": "percent (95 % interval)",
        "copies": "loss, nats a token (lower is better)",
    }[value]


def _beside(table: Table, title: str, value: str, dots: Mapping[str, tuple[TableRow, Value]], x: Options) -> Panel:
    """A dot for each name, in the colour of its kind of model; beside differences those of the paper."""
    kinds = sorted({row.model for row, _ in dots.values()}, key=lambda kind: [*COLOURS, kind].index(kind))
    looks = {kind.replace("_", "-"): Look(COLOURS.get(kind, INK)) for kind in kinds}
    points = [charts.dot(row.model.replace("_", "-"), name, *bar) for name, (row, bar) in dots.items()]
    if value != "difference":
        return charts.beside_names(title, points, looks, list(dots), x)
    others = {row.name: row for row in table.rows}
    for label, look in PRINTED.items():
        for name, (row, _) in dots.items():
            ours, base = getattr(row, label), getattr(others.get(row.against or "", row), label)
            if ours is not None and base is not None:
                looks[label] = look
                points.append(charts.dot(label, name, percent(ours, base)))
    return charts.beside_names(title, points, looks, list(dots), x, below=[charts.reference(x=0, dashed=False)])


def _copies(title: str, rows: Mapping[str, TableRow], x: Options) -> Panel:
    """Loss on the first and the second copy of a text."""
    looks = dict(zip(COPIES, (Look(PALETTE[1], "square"), Look(PALETTE[0])), strict=True))
    points = [
        charts.dot(label, name, nats, charts.around(nats, getattr(row, f"{key}_spread")))
        for label, key in COPIES.items()
        for name, row in rows.items()
        if (nats := getattr(row, key)) is not None
    ]
    return charts.beside_names(title, points, looks, list(rows), x, apart=True)


# ---- pictures of one experiment


def mapped(table: Table) -> list[TableRow]:
    """The row whose map is shown, and one of its length that retrieves the most recent blocks, if any. Rows with such a
    neighbour come first, then those with the longest text, then the best one.
    """
    known = [row for row in table.rows if _map(table, row)]
    recent = {row.length: row for row in reversed(known) if row.scorer == "recent"}
    looking = [row for row in known if row.scorer not in BY_CHANCE] or known
    if not looking:
        return []
    first = max(looking, key=lambda row: (row.length in recent, row.length, -(row.second_copy or 0.0)))
    second = recent.get(first.length, first)
    return [first] if second is first else [first, second]


def _map(table: Table, row: TableRow) -> dict[str, Any] | None:
    """Which blocks the tokens of the probe `copy` retrieve, of the first seed. A CSV has none."""
    return table.records[row.name][0]["results"].get("copy_map") if table.records else None


def _maps(table: Table) -> list[Panel]:
    """One scale of colours for all maps."""
    shown = [(row, found) for row in mapped(table) if (found := _map(table, row))]
    highest = max((value for _, found in shown for line in found["best"] for value in line), default=0.0)
    made = []
    for row, found in shown:
        half = row.length // 2
        note = f"layer {found['layer']}, head {found['head']}; the text is repeated from token {half:,} on"
        if found["found"] is not None:
            share = f"{100 * found['found']:.0f} %"
            note += f"; from the next chunk on {share} of the tokens find their earlier occurrence"
        title = f"Which blocks the tokens retrieve: {row.name}"
        titles = ("position of the token", "position of the block retrieved", SHARES[found["share_of"]])
        marks = {"highest": highest, "marked": half, "note": note}
        made.append(charts.square_map(title, found["best"], found["cell"], row.length, titles, **marks))
    return made


def _unique_blocks(table: Table) -> Lines:
    """Figure 5: a histogram of the distinct blocks that a chunk retrieves; each layer of each sample is one count."""
    points, names = [], [row.name for row in table.rows if row.distinct_blocks is not None and table.records]
    for name in names:
        layers = [layer for record in table.records[name] for layer in record["results"]["retrieval"]["layers"]]
        pooled = [sum(same) for same in zip(*(layer["distinct_blocks"] for layer in layers))]
        share = [100 * count / sum(pooled) for count in pooled]
        for number, each in enumerate([*share, 0.0]):  # the last closes the histogram
            points.append(charts.point(name, number - 0.5, each))
    looks = {name: Look(colour) for name, colour in zip(names, cycle(PALETTE))}
    x = {"title": "distinct blocks, all layers together", "axis": {"tickMinStep": 1, "format": "d"}}
    y = {"title": "layers of samples, percent", "scale": {"zero": True}}
    drawn = charts.curves("Distinct blocks of a chunk", points, looks, x, y, step=True)
    return [[drawn]] if points else []


FIGURES: dict[str, Callable[[Table], Lines]] = {
    "rows": _rows,
    "lines": _lines,
    "tasks": functools.partial(_lines, by_task=True),
    "unique_blocks": _unique_blocks,
}
