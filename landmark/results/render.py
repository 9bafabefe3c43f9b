"""A table for the terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from landmark.results.columns import COLUMNS, TableRow
from landmark.results.figures import draw, draw_positions
from landmark.results.tables import Table
from landmark.utils.files import write_atomic

_LEFT = 2  # columns of words
_COMMANDS = 3  # so many of one place are listed


def is_written(table: Table, folder: Path) -> bool:
    """Whether the same table was written below `folder` before."""
    path = _path(table, folder, "md")
    return path.exists() and path.read_text(encoding="utf-8") == as_markdown(table)


def write(table: Table, folder: Path) -> dict[str, Path]:
    """Write the CSV, the Markdown and the pictures of a table below `folder`. Returns their paths by kind."""
    paths = {kind: _path(table, folder, kind) for kind in ("csv", "md", "png")}
    write_atomic(paths["csv"], as_csv(table))
    write_atomic(paths["md"], as_markdown(table))
    write_atomic(paths["png"], draw(table))
    if (curves := draw_positions(table)) is not None:
        paths["positions"] = paths["png"].with_name(f"{table.stem}-positions.png")
        write_atomic(paths["positions"], curves)
    return paths


def as_text(table: Table) -> str:
    """Aligned columns, the header above, notes and comparisons below."""
    titles, rows = cells(table)
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    lines = [
        "  ".join(cell.ljust(w) if i < _LEFT else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in [titles, ["-" * width for width in widths], *rows]
    ]
    return "\n".join([table.header, "", *(line.rstrip() for line in lines), *_below(table)]) + "\n"


def as_markdown(table: Table) -> str:
    titles, rows = cells(table)
    rule = ["---" if i < _LEFT else "---:" for i in range(len(titles))]
    lines = [f"| {' | '.join(row)} |" for row in [titles, rule, *rows]]
    below = [f"- {line}" if line else "" for line in _below(table)]
    return "\n".join([f"**{table.header}**", "", *lines, *below]) + "\n"


def as_csv(table: Table) -> str:
    """Every number in full; the settings of the whole table are repeated in each row."""
    common = {key: getattr(table, key) for key in ("size", "data", "tokenizer", "split", "seeds")}
    columns, rows = plain(table)
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([*columns, *common])
    writer.writerows([*("" if value is None else value for value in row), *common.values()] for row in rows)
    return output.getvalue()


def plain(table: Table) -> tuple[list[str], list[list[Any]]]:
    """Keys of the columns, and the rows' bare values."""
    return list(COLUMNS), [list(asdict(row).values()) for row in table.rows]


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Titles of the columns that are shown, and the text of each row's cells."""
    shown = columns(table)
    return list(shown.values()), [[row.cell(key) for key in shown] for row in table.rows]


def columns(table: Table) -> dict[str, str]:
    """Keys of the columns that are shown, with their titles."""
    titled = {key: each for key, each in COLUMNS.items() if each.title}
    if table.data != "pg19":  # code has long words: their perplexity says nothing
        del titled["word_perplexity"]
    shown = {
        key: each.title
        for key, each in sorted(titled.items(), key=lambda item: item[1].group)
        if any(row.cell(key) != "-" for row in table.rows)
    }
    if table.figure == "lines" and "difference" in shown:
        shown["difference"] = "vs first of its length, nats"
    return shown


def _path(table: Table, folder: Path, kind: str) -> Path:
    return folder / table.name / f"{table.stem}.{kind}"


def _below(table: Table) -> Sequence[str]:
    notes = [f"{row.name}: {row.note}" for row in table.rows if row.note]
    if table.published:
        size = "attention size, " if any(row.attention_size is not None for row in table.rows) else ""
        notes.append(f"{size}paper, poster: the paper's columns; keys attended: ours, the mean over queries")
    return ["", *notes, *table.comparisons, *_measured(table.rows)]


def _measured(rows: Sequence[TableRow]) -> list[str]:
    """Where the numbers come from, a sentence for each command; of many at one place the first is named."""
    places: dict[str, dict[str, None]] = {}
    for row in rows:
        places.setdefault(row.place, {})[row.command] = None
    told = []
    for place, commands in places.items():
        if len(commands) <= _COMMANDS:
            told += [f"{place} by `{command}`" for command in commands]
        else:
            told.append(f"{place} by {len(commands)} commands, listed in the CSV, the first `{next(iter(commands))}`")
    return told
