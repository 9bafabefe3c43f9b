"""One HTML file of all that was measured: a section for each launch, then one for other rows. It runs no script."""

import base64
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from landmark.experiment.launches import Launch, rows_without_launch
from landmark.experiment.records import Contents, provenance
from landmark.results import paper, render, tables
from landmark.results.columns import COLUMNS, Record
from landmark.results.tables import Table
from landmark.utils.errors import counted
from landmark.utils.measured import kind_of

Values = dict[str, Any]


def page_content(contents: Contents, launches: Sequence[Launch], *, others: bool = True) -> Values:
    """Sections for every launch with a record, then, with `others`, for the rows of none; and what cannot be shown."""
    made = {
        f"{launch.config.name} ({launch.settings})": partial(_section, launch, rows)
        for launch in launches
        if (rows := launch.found(contents))
    }
    if others:
        made |= {
            title: partial(_other, title, rows) for title, rows in _groups(rows_without_launch(contents, launches))
        }
    sections, problems = [], list(contents.damaged)
    for name, make in made.items():
        try:
            sections.append(make())
        except Exception as error:  # of a whole record that another version of this program wrote
            problems.append(f"{name}: cannot be shown ({type(error).__name__}: {error})")
    place = provenance()
    return {
        "made": place["time"],
        "commit": (place["commit"] or "unknown")[:10],
        "counts": f"{counted(len(contents.runs), 'run')} and {counted(len(contents.rows), 'row')}",
        "problems": problems,
        "sections": sections,
    }


def _section(launch: Launch, rows: Mapping[str, list[Record]]) -> Values:
    from landmark.results import figures

    table = tables.of_experiment(launch.config, rows, launch.cells, list(launch.rows))
    title, claim = _claim(launch.config.name)
    return {
        "title": title,
        "claim": claim,
        "settings": launch.settings,
        "missing": [name for name in launch.rows if name not in table.records],
        "rest": launch.command(),
        "picture": base64.b64encode(figures.draw(table)).decode(),
        **_shown(table),
    }


def _other(title: str, rows: Mapping[str, list[Record]]) -> Values:
    table = tables.build(title, rows)
    claim = "Free sweeps, and rows of settings that no experiment has now. They need not share a text."
    return {"title": title, "claim": claim, "settings": table.settings, **_shown(table)}


def _shown(table: Table) -> Values:
    titles = render.columns(table)
    return {
        "header": table.header.removeprefix(table.name).lstrip(":, "),
        "columns": [(title, COLUMNS[key].meaning) for key, title in titles.items()],
        "rows": render.cells(table, titles),
        "notes": render.notes(table),
    }


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


def _groups(records: Sequence[Record]) -> list[tuple[str, dict[str, list[Record]]]]:
    """Rows of no experiment that can stand in one table, and its title."""
    groups: dict[str, dict[str, list[Record]]] = defaultdict(dict)
    for record in records:
        labels = record["labels"]
        place = f"{labels['data']}, {labels['size']}, {labels['tokenizer']}"
        rows = groups[f"Other rows: {kind_of(record['results'])} of {place}"]
        name = labels.get("row", record["id"])
        rows[f"{name} ({record['id']})" if name in rows else name] = [record]
    return list(groups.items())
