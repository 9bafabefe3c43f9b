"""A table for the terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from landmark.results.figures import draw, draw_positions
from landmark.results.tables import Table, TableRow
from landmark.utils.files import write_atomic

# Title, text of a cell.
_COLUMNS: list[tuple[str, Callable[[TableRow], str]]] = [
    ("row", lambda row: row.name),
    ("model", lambda row: row.model),
    ("length", lambda row: str(row.length)),
    ("local", lambda row: str(row.local)),
    ("blocks", lambda row: _text(row.blocks)),
    ("k", lambda row: _text(row.k)),
    ("attention size", lambda row: _text(row.attention_size)),
    ("keys attended", lambda row: _text(row.keys_attended, ".0f")),
    ("perplexity", lambda row: perplexity(row)),
    ("paper", lambda row: _text(row.paper, ".2f")),
    ("poster", lambda row: _text(row.poster, ".2f")),
    ("vs first row, nats", lambda row: _difference(row)),
    ("cutoff", lambda row: _text(row.cutoff)),
    ("dropped", lambda row: _percent(row.drop_rate, row.drop_rate_spread)),
    ("dropped, paper", lambda row: _percent(row.drop_rate_paper)),
    ("dropped, poster", lambda row: _percent(row.drop_rate_poster)),
    ("mapping", lambda row: _text(row.mapping)),
    ("accuracy", lambda row: _accuracy(row)),
    ("recall@1", lambda row: _recall(row.recall_at_1, row.recall_at_1_interval)),
    ("recall@10", lambda row: _recall(row.recall_at_10, row.recall_at_10_interval)),
    ("median rank", lambda row: _text(row.median_rank, ",.0f")),
    ("distinct blocks", lambda row: _text(row.distinct_blocks, ".1f")),
    ("moved, MB", lambda row: _text(None if row.bytes_moved is None else row.bytes_moved / 1e6, ".1f")),
    ("bits/byte", lambda row: _text(row.bits_per_byte, ".4f")),
    ("word ppl", lambda row: _text(row.word_perplexity, ".4g")),
    ("tokens/s", lambda row: _text(row.tokens_per_second, ",.0f")),
    ("searching", lambda row: _percent(row.searching)),
    ("peak, MB", lambda row: _text(None if row.resident_bytes is None else row.resident_bytes / 1e6, ",.0f")),
]
_LEFT = 2  # columns of words
_ALWAYS = {"row", "model", "length", "local"}  # the others are left out where no row has them


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
    """Every number in full, with what the whole table has in common repeated in each row."""
    common = {key: getattr(table, key) for key in ("size", "data", "tokenizer", "split", "seeds")}
    columns, rows = plain(table)
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([*columns, *common])
    writer.writerows([*("" if value is None else value for value in row), *common.values()] for row in rows)
    return output.getvalue()


def plain(table: Table) -> tuple[list[str], list[list[Any]]]:
    """Names of the columns, and the rows' bare values."""
    return [item.name for item in fields(TableRow)], [list(asdict(row).values()) for row in table.rows]


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Titles of the columns that say something, and the text of each row's cells."""
    columns = [(title, [cell(row) for row in table.rows]) for title, cell in _COLUMNS]
    columns = [(title, cells) for title, cells in columns if title in _ALWAYS or set(cells) != {"-"}]
    if table.data != "pg19":  # code has long words: the number says nothing
        columns = [(title, cells) for title, cells in columns if title != "word ppl"]
    if table.figure == "lines":
        renamed = {"vs first row, nats": "vs first of its length, nats"}
        columns = [(renamed.get(title, title), cells) for title, cells in columns]
    return [title for title, _ in columns], [list(row) for row in zip(*(cells for _, cells in columns))]


def perplexity(row: TableRow) -> str:
    """Perplexity ± its spread, to the digits that the spread leaves meaning."""
    if row.perplexity is None:
        return "-"
    if row.spread is None:
        return f"{row.perplexity:.2f}"
    digits = 2 if row.spread >= 0.01 else 3 if row.spread >= 0.001 else 4
    return f"{row.perplexity:.{digits}f} ± {row.spread:.{digits}f}"


def _path(table: Table, folder: Path, kind: str) -> Path:
    return folder / table.name / f"{table.stem}.{kind}"


def _below(table: Table) -> Sequence[str]:
    notes = [f"{row.name}: {row.note}" for row in table.rows if row.note]
    if table.published:
        size = "attention size, " if any(row.attention_size is not None for row in table.rows) else ""
        notes.append(f"{size}paper, poster: the paper's columns; keys attended: ours, the mean over queries")
    return ["", *notes, *table.comparisons, *dict.fromkeys(row.measured for row in table.rows)]


def _difference(row: TableRow) -> str:
    if row.difference is None:
        return "-"
    return f"{row.difference:+.4f} ± {_text(row.difference_error, '.4f')}"


def _accuracy(row: TableRow) -> str:
    """Percent of the prompts, and the interval."""
    if row.accuracy is None:
        return "-"
    low, high = ("?" if bound is None else f"{100 * bound:.0f}" for bound in (row.accuracy_low, row.accuracy_high))
    return f"{100 * row.accuracy:.0f} % [{low}, {high}]"


def _recall(share: float | None, interval: tuple[float, float] | None) -> str:
    """Percent of the texts, and the interval; chance has none."""
    if share is None:
        return "-"
    if interval is None:
        return f"{100 * share:.3f} %"
    return f"{100 * share:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def _percent(share: float | None, spread: float | None = None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.0f} %" if spread is None else f"{100 * share:.1f} ± {100 * spread:.1f} %"


def _text(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)
