"""The pictures of a table, drawn from its records alone: what `landmark.results.figures` shows, for page.js to draw."""

import math
import statistics
from collections import defaultdict

from landmark.results.figures.lines import FAR
from landmark.results.figures.positions import FAR as FAR_POSITIONS
from landmark.results.figures.positions import FAR_PERCENT, curves
from landmark.results.figures.style import series
from landmark.results.report.shapes import Chart, around, by_model, change, dots, heat, line, lines, looks, percent
from landmark.results.tables import Table, TableRow

LENGTH = {"title": "evaluation length, tokens", "scale": "log", "each": True}
INK = -1  # the colour of what the paper printed


def of_table(table: Table) -> list[Chart]:
    """What an experiment's `figure` shows, a heat map where rows make up a grid, and curves over positions."""
    figure = "rows" if table.figure == "heatmap" and not table.cells else table.figure
    more = [chart | {"more": True} for chart in _positions(table)]
    return [*_FIGURES[figure](table), *_granularities(table), *more]


def of_trainings(curves_of: dict[str, dict[str, list[tuple[float, float]]]]) -> list[Chart]:
    """Loss of runs against the step: name of a run to `train` and `validation` to (step, nats a token)."""
    if not any(each["train"] for each in curves_of.values()):
        return []
    drawn = []
    for number, (name, each) in enumerate(curves_of.items()):
        drawn.append(line(name, each["train"], number, marks=False))
        if each["validation"]:
            drawn.append(line(f"{name}, validation", each["validation"], number, mark=1, dash=True))
    values = sorted(value for each in curves_of.values() for _, value in each["train"])
    top = values[int(0.97 * (len(values) - 1))]
    y = {"title": "loss, nats a token", "top": top, "quiet": True}
    return [lines("Training", {"title": "step"}, y, drawn) | {"more": True}]


def against_paper(tables: dict[str, Table]) -> Chart | None:
    """What each row changes from its table's first, in the paper and here, by the title of the table."""
    drawn = []
    for number, (title, table) in enumerate(tables.items()):
        base = table.rows[0]
        points = [
            [percent(row.paper, base.paper), *change(row, base), row.name]
            for row in table.rows[1:]
            if row.paper is not None and base.paper is not None and row.perplexity is not None
        ]
        if points:
            drawn.append({"name": title, "points": points, "colour": number, "mark": number, "line": False})
    if not drawn:
        return None
    x = {"title": "perplexity against the table's first row in the paper, percent"}
    y = {"title": "the same, measured here, percent"}
    return lines("Ours against the paper's", x, y, drawn) | {"diagonal": True}


def headline(table: Table) -> list[str]:
    """A row, and what it reaches here and in the paper: the paper's best with landmarks, else ours, against the table's
    first row; of prompts, the longest of which most are answered."""
    base, rows = table.rows[0], table.rows[1:]
    answered = [row for row in table.rows if (row.accuracy or 0.0) >= 0.8]
    if any(row.accuracy is not None for row in table.rows):
        best = max(answered, key=lambda row: row.length, default=None)
        return ["-", "-", "-"] if best is None else [best.name, f"{100 * (best.accuracy or 0.0):.0f} %", "-"]
    measured = [row for row in rows if row.perplexity is not None]
    if base.perplexity is None or not measured:
        return ["-", "-", "-"]
    printed = [row for row in measured if row.paper is not None and base.paper is not None]
    printed = [row for row in printed if row.model == "landmark"] or printed
    best = min(printed or measured, key=lambda row: (row.paper if printed else row.perplexity) or math.inf)
    value, low, _ = change(best, base)
    ours = f"{value:+.2f} %" + (f" ± {value - low:.2f}" if low < value else "")
    return [f"{best.name} against {base.name}", ours, f"{percent(best.paper, base.paper):+.2f} %" if printed else "-"]


def _rows(table: Table) -> list[Chart]:
    names = [row.name for row in table.rows]
    ours = by_model(table, lambda row: None if row.perplexity is None else around(row.perplexity, row.spread))
    charts = [dots("Perplexity, measured here", "perplexity, lower is better", names, ours)]
    base = table.rows[0]
    if len(table.rows) > 1 and base.perplexity is not None:
        changed = by_model(table, lambda row: None if row.perplexity is None else change(row, base))
        for label, mark in (("paper", 3), ("poster", 4)):
            first = getattr(base, label)
            points = [
                [y, *around(percent(value, first))]
                for y, row in enumerate(table.rows)
                if first is not None and (value := getattr(row, label)) is not None
            ]
            if points:
                changed.append({"name": label, "points": points, "colour": INK, "mark": mark})
        title = f"perplexity against {base.name}, percent (± paired standard error)"
        charts.append(dots("Change from the first row", title, names, changed))
    return charts


def _lengths(table: Table) -> list[Chart]:
    found = series(table)
    look = looks(found)
    measured = [row for row in table.rows if row.perplexity is not None]
    absolute = [
        look[name] | {"points": [[row.length, *around(row.perplexity, row.spread)] for row in rows if row.perplexity]}
        for name, rows in found.items()
    ]
    top = FAR * statistics.median(row.perplexity or math.nan for row in measured) if measured else None
    charts = [lines("Perplexity against length", LENGTH, {"title": "perplexity", "top": top}, absolute)]
    relative = [
        look[name]
        | {"points": [[row.length, *around(row.difference, row.difference_error)] for row in rows if row.against]}
        for name, rows in found.items()
    ]
    if any(each["points"] for each in relative):
        errors = sorted(row.difference_error for row in table.rows if row.difference_error)
        threshold = 10.0 ** math.ceil(math.log10(errors[len(errors) // 2])) if errors else 0.01
        y = {"title": f"nats a token above {next(iter(found))}, paired", "zero": True}
        if any(abs(row.difference or 0.0) > threshold for row in table.rows):
            y |= {"scale": "symlog", "threshold": threshold}
        charts.append(lines("Difference at the same length", LENGTH, y, relative))
    return charts


def _grid(table: Table) -> list[Chart]:
    keys = list(next(iter(table.cells.values())))
    values = [list(dict.fromkeys(cell[key] for cell in table.cells.values())) for key in keys]
    rows = {(*table.cells[row.name].values(),): row for row in table.rows if row.name in table.cells}
    at = [[rows.get((a, b)) for b in values[1]] for a in values[0]]
    name = keys[0].rpartition(".")[2]
    joined = [
        line(f"{name} = {first}", [(row.keys_attended or 0.0, row.perplexity) for row in same if row], number)
        for number, (first, same) in enumerate(zip(values[0], at, strict=True))
    ]
    others = [
        line(row.name, [(row.keys_attended, row.perplexity)], len(joined) + number)
        for number, row in enumerate(row for row in table.rows if row.name not in table.cells)
        if row.keys_attended is not None
    ]
    return [
        heat("Perplexity", keys, values, [[row and row.perplexity for row in each] for each in at]),
        lines("Perplexity against keys", {"title": "keys attended, mean"}, {"title": "perplexity"}, joined + others),
    ]


def _granularities(table: Table) -> list[Chart]:
    """Where the same settings were read with several granularities."""
    where = {row.name: f"{row.length:,} tokens, k = {row.k}" for row in table.rows if row.granularity}
    found = {(row.granularity or "", where[row.name]): row for row in table.rows if row.name in where}
    values = [list(dict.fromkeys(key[axis] for key in found)) for axis in range(2)]
    if len(values[0]) < 2 or len(found) < len(where) or not all(row.perplexity for row in found.values()):
        return []
    at = [[found.get((a, b)) for b in values[1]] for a in values[0]]
    return [heat("Perplexity", ["granularity", ""], values, [[row and row.perplexity for row in each] for each in at])]


def _accuracy(table: Table) -> list[Chart]:
    found = series(table)
    look = looks(found)
    drawn = [look[name] | {"points": [_answered(row) for row in rows]} for name, rows in found.items()]
    charts = [lines("Prompts answered", LENGTH, {"title": "percent of the prompts", "range": [0, 100]}, drawn)]
    off_device = {name: rows for name, rows in found.items() if all(row.resident_bytes for row in rows)}
    for title, value in (
        ("Peak memory, MB", lambda row: row.resident_bytes / 1e6),
        ("Tokens a second", lambda row: row.tokens_per_second),
    ):
        drawn = [
            look[name] | {"points": [[row.length, *around(value(row))] for row in rows]}
            for name, rows in off_device.items()
        ]
        if drawn:
            charts.append(lines(f"{title}, blocks off the device", LENGTH, {"title": title, "zero": True}, drawn))
    return charts


def _answered(row: TableRow) -> list[float]:
    value = row.accuracy or 0.0
    bounds = (value if bound is None else bound for bound in (row.accuracy_low, row.accuracy_high))
    return [row.length, 100 * value, *(100 * bound for bound in bounds)]


def _drop_rates(table: Table) -> list[Chart]:
    dropping = [row for row in table.rows if row.drop_rate is not None]
    one = [row for row in dropping if not (row.cutoff or "").startswith("[")]
    kinds = {"one cutoff for all layers": one, "one for each layer": [row for row in dropping if row not in one]}
    drawn = []
    for number, (name, rows) in enumerate(kinds.items()):
        measured = [row for row in rows if row.perplexity is not None]
        points = [[100 * (row.drop_rate or 0.0), *around(row.perplexity), row.name] for row in measured]
        if points:
            drawn.append(
                {"name": name, "points": sorted(points), "colour": number, "mark": number, "line": number == 0}
            )
    levels = [[row.name, row.perplexity] for row in table.rows if row.drop_rate is None and row.perplexity is not None]
    x = {"title": "lookups dropped, percent"}
    charts = [lines("Perplexity against what is dropped", x, {"title": "perplexity"}, drawn) | {"levels": levels}]
    one.sort(key=lambda row: float(row.cutoff or 0))
    rates = [[each["results"]["memory"]["drop_rates"] for each in table.records[row.name]] for row in one]
    if rates:
        layers = [str(layer) for layer in range(len(rates[0][0]))]
        percent = [
            [100 * statistics.fmean(rate for seed in seeds for rate in seed[layer]) for seeds in rates]
            for layer in range(len(layers))
        ]
        values = [layers, [row.cutoff or "" for row in one]]
        charts.append(heat("Lookups dropped, percent", ["layer", "cutoff"], values, percent, digits=0))
    return charts


def _recall(table: Table) -> list[Chart]:
    drawn = []
    for number, (key, name) in enumerate({"recall_at_1": "first", "recall_at_10": "among the first ten"}.items()):
        points = []
        for y, row in enumerate(table.rows):
            if (share := getattr(row, key)) is not None:
                interval = getattr(row, f"{key}_interval") or (share, share)
                points.append([y, 100 * share, 100 * interval[0], 100 * interval[1]])
        drawn.append({"name": name, "points": points, "colour": number, "mark": number})
    return [dots("Places found", "percent of the texts (95 % interval)", [row.name for row in table.rows], drawn)]


def _distinct(table: Table) -> list[Chart]:
    """Figure 5: how many samples retrieve so many distinct blocks, over all layers and layer by layer."""
    charts, pooled = [], []
    rows = [row for row in table.rows if row.distinct_blocks is not None]
    for number, row in enumerate(rows):
        found = [record["results"]["retrieval"]["layers"] for record in table.records[row.name]]
        layers = [
            [sum(same) for same in zip(*(layer["distinct_blocks"] for layer in seeds), strict=True)]
            for seeds in zip(*found, strict=True)
        ]
        together = [sum(same) for same in zip(*layers, strict=True)]
        share = [100 * count / sum(together) for count in together]
        pooled.append(line(row.name, list(enumerate(share)), number))
        values = [[str(layer) for layer in range(len(layers))], [str(count) for count in range(len(together))]]
        percent = [[100 * count / sum(layer) for count in layer] for layer in layers]
        charts.append(
            heat(f"{row.name}: percent of the samples", ["layer", "distinct blocks"], values, percent, digits=0)
        )
    x, y = {"title": "distinct blocks, all layers together"}, {"title": "percent of the samples", "zero": True}
    megabytes = [[number, *around((row.bytes_moved or 0.0) / 1e6)] for number, row in enumerate(rows)]
    moved = [{"name": "MB", "points": megabytes, "colour": 0, "mark": 0}]
    title = "MB to move for a chunk, all layers"
    return [
        lines("Distinct blocks of a chunk", x, y, pooled),
        dots("Bytes moved", title, [row.name for row in rows], moved),
        *charts,
    ]


def _positions(table: Table) -> list[Chart]:
    """Perplexity by position, rows of one length together, and their change from the first of them."""
    drawn, panels = curves(table), defaultdict(list)
    for row in table.rows:
        if row.name in drawn:
            panels[1 << (row.length - 1).bit_length()].append(row)
    charts = []
    x = {"title": "position within the segment, tokens", "scale": "log"}
    for _, rows in sorted(panels.items()):
        lengths = " and ".join(f"{length:,}" for length in sorted({row.length for row in rows}))
        ours = {row.name: drawn[row.name] for row in rows}
        top = FAR_POSITIONS * statistics.median(y for curve in ours.values() for _, y in curve)
        drawn_lines = [line(name, curve, number, marks=False) for number, (name, curve) in enumerate(ours.items())]
        charts.append(lines(f"By position, segments of {lengths}", x, {"title": "perplexity", "top": top}, drawn_lines))
        base, first = rows[0].name, dict(ours[rows[0].name])
        if len(rows) > 1:
            changes = [
                line(name, [(at, percent(y, first[at])) for at, y in curve if at in first], number, marks=False)
                for number, (name, curve) in enumerate(ours.items())
            ]
            y = {"title": f"percent against {base}", "top": FAR_PERCENT}
            charts.append(lines(f"The same, against {base}", x, y, changes))
    return charts


_FIGURES = {
    "rows": _rows,
    "lines": _lengths,
    "heatmap": _grid,
    "accuracy": _accuracy,
    "drop_rate": _drop_rates,
    "recall": _recall,
    "unique_blocks": _distinct,
}
