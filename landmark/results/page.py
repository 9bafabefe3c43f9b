"""One HTML file of all that was measured: tables beside the paper's, pictures, where each number comes from.

It has a section for each launch of an experiment, then one for all other rows. A browser draws the pictures, and may
run no text as code: Vega interprets its expressions.
"""

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING, Any

from landmark.config.command_line import program
from landmark.experiment.launches import Launch, rows_without_launch
from landmark.experiment.records import Contents, provenance
from landmark.results import paper, render, tables
from landmark.results.columns import COLUMNS, Record, provenance_of
from landmark.results.tables import Table
from landmark.utils.html_page import self_contained_page
from landmark.utils.measured import kind_of
from landmark.utils.metrics_csv import curve, metrics_so_far

if TYPE_CHECKING:
    from landmark.results.charts import Panel

Values = dict[str, Any]
VERDICTS = {" is better than ": "yes", " is WORSE than ": "worse", " is NOT better ": "no", " do not differ ": "no"}


def as_html(content: Values) -> str:
    """The file for the content that `page_content` returns."""
    import vl_convert

    folder = files("landmark.results") / "web"
    template, style, *scripts = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "charts.js", "page.js")
    )
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    return self_contained_page(template, style, [library, "\n".join(scripts)], _finite(content))


def _finite(value: Any) -> Any:
    """JSON has no NaN: None stands for a missing number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page_content(contents: Contents, launches: Sequence[Launch], *, others: bool = True) -> Values:
    """Sections for every launch, then for the rows of none, and a list of records that could not be shown.

    Args:
        contents: all records.
        launches: those to show; one of which nothing has a record yet has no section.
        others: whether rows that belong to none of the launches are shown.
    """
    from landmark.results import figures

    sections: list[Values] = []
    built: dict[str, Table] = {}
    problems = list(contents.damaged)
    found = [(launch, rows) for launch in launches if (rows := launch.found(contents))]
    titles = Counter(launch.experiment for launch, _ in found)
    for number, (launch, rows) in enumerate(found):
        try:
            title, claim = _claim(launch.experiment)
            table = _table(launch, rows)
            built[title if titles[launch.experiment] == 1 else f"{title} ({launch.settings})"] = table
            sections.append(_section(f"s{number}", title, claim, launch, table))
        except Exception as error:  # of a whole record that another version of this program wrote
            problems.append(f"{launch.experiment}: cannot be shown ({type(error).__name__}: {error})")
    for title, rows in _groups(rows_without_launch(contents, launches)).items() if others else ():
        try:
            table = tables.build(title, {name: [record] for name, record in rows.items()})
            sections.append(_other(f"o{len(sections)}", title, table))
        except Exception as error:
            problems.append(f"{title}: cannot be shown ({type(error).__name__}: {error})")
    made, overview = provenance(), figures.against_paper(built)
    return {
        "made": made["time"],
        "commit": (made["commit"] or "unknown")[:10],
        "counts": {"runs": len(contents.runs), "rows": len(contents.rows)},
        "problems": problems,
        "charts": [] if overview is None else _charts([overview]),
        "sections": sections,
    }


def _table(launch: Launch, rows: Mapping[str, list[Record]]) -> Table:
    return tables.build(
        launch.experiment,
        rows,
        paper=paper.read_paper(launch.experiment),
        comparisons=launch.config.compare,
        figure=launch.config.figure,
        panels=launch.config.panels,
        cells=launch.cells,
        asked=list(launch.rows),
    )


def _section(key: str, title: str, claim: str, launch: Launch, table: Table) -> Values:
    """A table and its pictures; folded away, curves over positions and of the trainings."""
    from landmark.results import figures

    missing = [name for name in launch.rows if name not in table.records]
    commands = {name: launch.command(f"row={name}") for name in launch.rows}
    return {
        "id": key,
        "name": launch.experiment,
        "title": title,
        "claim": claim,
        "headline": _headline(table),
        "settings": launch.settings,
        "done": len(launch.rows) - len(missing),
        "total": len(launch.rows),
        "missing": missing,
        "rest": launch.command(),
        **_shown(table, commands),
        "charts": _charts(chain(*figures.panels(table))),
        "more": _charts([*chain(*figures.positions(table)), *_trainings(table, launch)]),
    }


def _other(key: str, title: str, table: Table) -> Values:
    commands = {name: shlex.join([*program(), *_words(records[0])]) for name, records in table.records.items()}
    return {
        "id": key,
        "name": "other",
        "title": title,
        "claim": "Free sweeps, and rows of settings that no experiment has now. They need not share a text.",
        "settings": table.settings,
        "missing": [],
        **_shown(table, commands),
        "charts": [],
    }


def _shown(table: Table, commands: Mapping[str, str]) -> Values:
    titles = render.columns(table)
    return {
        "header": table.header.removeprefix(table.name).lstrip(":, "),
        "columns": [{"title": title, "tooltip": COLUMNS[key].meaning} for key, title in titles.items()],
        "rows": [
            {"cells": texts, "source": _source(table.records[row.name], commands[row.name])}
            for row, texts in zip(table.rows, render.cells(table, titles), strict=True)
        ],
        "notes": [f"{row.name}: {row.note}" for row in table.rows if row.note],
        "comparisons": [{"text": text, "verdict": _verdict(text)} for text in table.comparisons],
    }


def _trainings(table: Table, launch: Launch) -> "list[Panel]":
    """The losses of the runs that the rows read."""
    from landmark.results import figures

    folders = dict.fromkeys(job.run.folder for jobs in launch.rows.values() for job in jobs if not job.run.is_given)
    runs = {}
    for folder in folders:
        metrics = metrics_so_far(folder)
        curves = {kind: curve(metrics, f"{kind}/loss") for kind in ("train", "validation")}
        if curves["train"]:
            runs[folder.name.replace(f"-{table.data}-{table.size}-", " ")] = curves
    return [figures.training(runs)] if runs else []


def _charts(panels: "Iterable[Panel]") -> list[Values]:
    return [{"title": panel.title, "note": panel.note, "spec": panel.chart.to_dict()} for panel in panels]


def _source(records: Sequence[Record], command: str) -> Values:
    """Where a row comes from; of several seeds, the last that was made."""
    record = max(records, key=lambda each: each["provenance"]["time"])
    made = record["provenance"]
    return {
        "command": command,
        "made by": made["command"],
        "commit": made["commit"] or "unknown",
        "time": made["time"],
        "hardware": provenance_of(record)["hardware"],
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version),
        "records": ", ".join(f"records/rows/{each['id']}.json" for each in records),
        "run": ", ".join(dict.fromkeys(each["settings"]["run"] for each in records)),
    }


def _headline(table: Table) -> list[str]:
    """The most telling row, its number here and in the paper.

    Of prompts: the longest ones of which most are answered. Else the change of perplexity from the table's first row:
    that of the paper's best row with landmarks, or of our best row where the paper has none, among the rows that
    measure the same.
    """
    from landmark.results.figures import change, percent

    base, nothing = table.rows[0], ["-", "-", "-"]
    if any(row.accuracy is not None for row in table.rows):
        answered = [row for row in table.rows if (row.accuracy or 0.0) >= 0.8]
        best = max(answered, key=lambda row: row.length, default=None)
        return nothing if best is None else [best.name, f"{100 * (best.accuracy or 0.0):.0f} %", "-"]
    measured = [row for row in table.rows[1:] if row.perplexity is not None and row.measured == base.measured]
    if base.perplexity is None or not measured:
        return nothing
    printed = [row for row in measured if row.paper is not None and base.paper is not None]
    printed = [row for row in printed if row.model == "landmark"] or printed
    best = min(printed or measured, key=lambda row: (row.paper if printed else row.perplexity) or math.inf)
    value, (low, _) = change(best, base)
    ours = f"{value:+.2f} %" + (f" ± {value - low:.2f}" if low < value else "")
    return [f"{best.name} against {base.name}", ours, f"{percent(best.paper, base.paper):+.2f} %" if printed else "-"]


def _claim(name: str) -> tuple[str, str]:
    """Title and claim of an experiment's README, without marks of Markdown."""
    path = paper.folder_of_experiment(name) / "README.md"
    if not path.exists():
        return name, ""
    text = path.read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    claim = re.search(r"\*\*Claim\.\*\*\s*(.+?)\n\n", text, re.DOTALL)
    said = " ".join(claim[1].split()) if claim else ""
    return title[1] if title else name, re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*|`", lambda mark: mark[1] or "", said)


def _verdict(comparison: str) -> str:
    return next((verdict for words, verdict in VERDICTS.items() if words in comparison), "unknown")


def _groups(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Rows of no experiment that can stand in one table, each named by its own overrides."""
    groups = defaultdict(list)
    for record in records:
        labels = record["labels"]
        asked = kind_of(record["results"])
        groups[labels["size"], labels["data"], labels["tokenizer"], asked].append(record)
    named = {}
    for (size, data, tokenizer, asked), each in groups.items():
        shared = set.intersection(*(set(_words(record)) for record in each))
        names: dict[str, Record] = {}
        for record in each:
            words = [word for word in _words(record) if word not in shared]
            name = " ".join(words) or record["labels"].get("row", record["id"])
            names[f"{name} ({record['id']})" if name in names else name] = record
        named[f"Other rows: {asked} of {data}, {size}, {tokenizer}"] = names
    return named


def _words(record: Record) -> list[str]:
    """Command-line overrides that made a row, without those that say where."""
    given = record["labels"].get("overrides") or []
    return [word for word in given if not word.startswith(("output=", "logger=", "trainer"))]
