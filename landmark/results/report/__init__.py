"""One HTML file of all that was measured: tables beside the paper's, pictures, where each number comes from.

`collect` gives its content as plain values, `page` the file: nothing in it is asked for from elsewhere, and its scripts
are known by their hash to the browser, which runs no other. What stands in a record is shown as text, never as HTML.
"""

import base64
import hashlib
import json
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from landmark.experiment.launches import Launch, rows_without_launch
from landmark.experiment.provenance import provenance
from landmark.experiment.records import Contents, Record, Records
from landmark.results import paper, render, tables
from landmark.results.report import charts
from landmark.results.tables import Table
from landmark.utils.locations import EXPERIMENTS
from landmark.utils.metrics_csv import curve, metrics_so_far

Values = dict[str, Any]


def page(content: Values) -> str:
    """The file for what `collect` returns."""
    folder = files("landmark.results.report")
    names = ("page.html", "page.css", "charts.js", "page.js")
    template, style, *scripts = ((folder / name).read_text(encoding="utf-8") for name in names)
    script = "\n".join(scripts)
    text = json.dumps(_finite(content), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"style": style, "script": script, "content": text}
    parts |= {"style_hash": _hash(style), "script_hash": _hash(script)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def collect(records: Records, contents: Contents, launches: Sequence[Launch], *, others: bool = True) -> Values:
    """Sections for every experiment as it was launched, then for the rows of none; what could not be shown.

    others: whether rows that belong to none of the launches are shown.
    """
    sections, built, problems = [], {}, list(contents.damaged)
    titles = Counter(launch.experiment for launch in launches)
    for number, launch in enumerate(launches):
        try:
            title, claim = _claim(launch.experiment)
            table = _table(launch)
            if table is not None:
                label = title if titles[launch.experiment] == 1 else f"{title} ({launch.settings})"
                built[label] = table
            sections.append(_section(f"s{number}", title, claim, launch, table, records))
        except Exception as error:  # of a record that is whole and yet not what this version writes
            problems.append(f"{launch.experiment}: cannot be shown ({type(error).__name__}: {error})")
    for title, rows in _groups(rows_without_launch(contents, launches)).items() if others else ():
        try:
            table = tables.build(title, {name: [record] for name, record in rows.items()})
            sections.append(_other(f"o{len(sections)}", title, table))
        except Exception as error:
            problems.append(f"{title}: cannot be shown ({type(error).__name__}: {error})")
    made = provenance()
    return {
        "made": made["time"],
        "commit": (made["commit"] or "unknown")[:10],
        "counts": {"runs": len(contents.runs), "rows": len(contents.rows)},
        "problems": problems,
        "overview": [chart for chart in [charts.against_paper(built)] if chart],
        "sections": sections,
    }


def _table(launch: Launch) -> Table | None:
    if not launch.found:
        return None
    return tables.build(
        launch.experiment,
        launch.found,
        paper=paper.read_paper(launch.experiment),
        comparisons=launch.compare,
        paired=tables.paired_records,
        figure=launch.figure,
        cells=launch.cells,
    )


def _section(key: str, title: str, claim: str, launch: Launch, table: Table | None, records: Records) -> Values:
    rest = ["python", "run.py", *launch.overrides]
    command = {
        name: shlex.join([*(word for word in rest if not word.startswith("output=")), f"row={name}"])
        for name in launch.rows
    }
    shown = {} if table is None else _shown(table, command)
    return {
        "id": key,
        "name": launch.experiment,
        "title": title,
        "claim": claim,
        "headline": ["-", "-", "-"] if table is None else charts.headline(table),
        "settings": launch.settings,
        "done": len(launch.found),
        "total": len(launch.rows),
        "missing": launch.missing,
        "rest": shlex.join(rest),
        **shown,
        "charts": [] if table is None else [*charts.of_table(table), *_trainings(launch, records)],
    }


def _other(key: str, title: str, table: Table) -> Values:
    command = {name: shlex.join(["python", "run.py", *_words(records[0])]) for name, records in table.records.items()}
    return {
        "id": key,
        "name": "other",
        "title": title,
        "claim": "Free sweeps, and rows of settings that no experiment has now. They need not share a text.",
        "settings": f"size {table.size}, data {table.data}, tokenizer {table.tokenizer}",
        "done": len(table.rows),
        "total": len(table.rows),
        "missing": [],
        "rest": "",
        **_shown(table, command),
        "charts": [],
    }


def _shown(table: Table, commands: dict[str, str]) -> Values:
    titles, rows = render.cells(table)
    return {
        "header": table.header.removeprefix(f"{table.name}: "),
        "columns": titles,
        "rows": [
            {"cells": cells, "source": _source(table.records[row.name], commands[row.name])}
            for row, cells in zip(table.rows, rows, strict=True)
        ],
        "notes": [f"{row.name}: {row.note}" for row in table.rows if row.note],
        "comparisons": [{"text": text, "verdict": _verdict(text)} for text in table.comparisons],
    }


def _source(records: Sequence[Record], command: str) -> Values:
    """Where a row comes from; of several seeds, the last that was made."""
    record = max(records, key=lambda each: each["provenance"]["time"])
    made, hardware = record["provenance"], record["provenance"]["hardware"]
    return {
        "command": command,
        "made by": f"python {made['command']}",
        "commit": made["commit"] or "unknown",
        "time": made["time"],
        "hardware": ", ".join([*hardware.get("gpus", []), f"{hardware['cpu']}, {hardware['cores']} cores"]),
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version),
        "records": ", ".join(f"records/rows/{each['id']}.json" for each in records),
        "run": ", ".join(dict.fromkeys(each["settings"]["run"] for each in records)),
    }


def _trainings(launch: Launch, records: Records) -> list[charts.Chart]:
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for entries in launch.rows.values():
        for entry in entries:
            if (folder := entry.run_name) is not None:
                name = folder.replace(f"-{launch.labels['data']}-{launch.labels['size']}-", " ")
                if name not in found:
                    metrics = metrics_so_far(records.output / "runs" / folder)
                    found[name] = {kind: curve(metrics, f"{kind}/loss") for kind in ("train", "validation")}
    return charts.of_trainings({name: each for name, each in found.items() if each["train"]})


def _claim(name: str) -> tuple[str, str]:
    """Title and claim of an experiment's README, without marks of Markdown."""
    path = EXPERIMENTS / name / "README.md"
    if not path.exists():
        return name, ""
    text = path.read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    claim = re.search(r"\*\*Claim\.\*\*\s*(.+?)\n\n", text, re.DOTALL)
    said = " ".join(claim[1].split()) if claim else ""
    return title[1] if title else name, re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*|`", lambda mark: mark[1] or "", said)


def _verdict(comparison: str) -> str:
    for words, verdict in ((" is better than ", "yes"), (" is WORSE than ", "worse"), (" is NOT better ", "no")):
        if words in comparison:
            return verdict
    return "unknown"


def _groups(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Rows of no experiment that can stand in one table, each named by what sets it apart."""
    groups = defaultdict(list)
    for record in records:
        labels = record["labels"]
        asked = "prompts" if "prompts" in record["results"] else "text"
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
    """Command-line overrides that made a row, but for where it was made."""
    given = record["labels"].get("overrides") or []
    return [word for word in given if not word.startswith(("output=", "logger=", "trainer"))]


def _finite(value: Any) -> Any:
    """JSON has no NaN: None stands for a number that there is not."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
