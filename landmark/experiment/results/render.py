"""A table for the terminal, as Markdown and as CSV."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from landmark.experiment.results.columns import COLUMNS, TableRow
from landmark.experiment.results.tables import Table, errors_of
from landmark.utils.data_frames import aligned, csv_text
from landmark.utils.errors import UserError
from landmark.utils.files import open_written, write_atomic

_WORDS = ("name", "model")
_SETTINGS = ("model", "length", "local", "blocks", "k", "cutoff", "mapping")
# Columns that a narrow terminal does not show, the first that go first.
_DISPENSABLE = (
    *("tokens_per_second", "word_perplexity", "bits_per_byte", "bytes_moved", "searching", "resident_bytes"),
    *("attention_size", "poster", "drop_rate_poster", "keys_attended", "model"),
)
_COMMANDS = 3  # so many of one place are listed


def is_written(table: Table, folder: Path, launch: str = "") -> bool:
    """Whether the same table was written below `folder` before. launch: as for `write`."""
    try:
        with open_written(_path(table, folder, "md", launch)) as file:
            return file.read() == as_markdown(table).encode()
    except UserError:
        return False


def write(table: Table, folder: Path, launch: str = "") -> dict[str, Path]:
    """Write a table as CSV, Markdown and picture. Returns their paths by kind. launch: in names of further files."""
    from landmark.experiment.results import figures

    made = {"csv": as_csv(table), "md": as_markdown(table), "png": figures.draw(table)}
    for name in dict.fromkeys((launch, "")):
        for kind, content in made.items():
            write_atomic(_path(table, folder, kind, name), content)
    return {kind: _path(table, folder, kind) for kind in made}


def as_text(table: Table, width: int | None = None) -> str:
    """Aligned columns, what all rows share above, notes below. width: in characters; wider columns are named."""
    shown, shared = columns(table), {}
    if len(table.rows) > 1:
        same = [key for key in _SETTINGS if key in shown and len({row.cell(key) for row in table.rows}) == 1]
        shared = {shown.pop(key): table.rows[0].cell(key) for key in same}
    left_out = []
    lines = _aligned(table, shown, "simple").splitlines()
    while width is not None and max(map(len, lines)) > width:
        if (key := next((key for key in _DISPENSABLE if key in shown), None)) is None:
            break
        left_out.append(shown.pop(key))
        lines = _aligned(table, shown, "simple").splitlines()
    above = [f"all rows: {', '.join(f'{title} {value}' for title, value in shared.items())}"] if shared else []
    below = [f"in the CSV alone: {', '.join(left_out)}"] if left_out else []
    return "\n".join([table.header, *above, "", *lines, *below, *notes(table)]) + "\n"


def as_markdown(table: Table) -> str:
    """The table with its header and notes."""
    below = [f"- {line}" if line else "" for line in notes(table)]
    return "\n".join([f"**{table.header}**", "", _aligned(table, columns(table), "pipe"), *below]) + "\n"


def as_csv(table: Table) -> str:
    """Every number in full; the settings of the whole table are repeated in each row."""
    common = {key: getattr(table, key) for key in ("size", "data", "tokenizer", "split")}
    return csv_text([asdict(row) | common for row in table.rows])


def plain(table: Table) -> tuple[list[str], list[list[Any]]]:
    """Keys of the columns, and the rows' bare values."""
    return list(COLUMNS), [list(asdict(row).values()) for row in table.rows]


def _aligned(table: Table, shown: Mapping[str, str], form: str) -> str:
    return aligned(shown.values(), cells(table, shown), sum(key in shown for key in _WORDS), form)


def cells(table: Table, shown: Iterable[str]) -> list[list[str]]:
    """The text of each row's cells in these columns."""
    return [[row.cell(key) for key in shown] for row in table.rows]


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


def _path(table: Table, folder: Path, kind: str, launch: str = "") -> Path:
    return folder / table.name / f"{table.stem}{f'-{launch}' if launch else ''}.{kind}"


def notes(table: Table) -> Sequence[str]:
    """What stands below a table, an empty line first: errors, remarks, comparisons, and where the numbers come from."""
    said = [f"{row.name}: {row.note}" for row in table.rows if row.note]
    if table.published:
        size = "attention size, " if any(row.attention_size is not None for row in table.rows) else ""
        said.append(f"{size}paper, poster: the paper's columns; keys attended: ours, the mean over queries")
        if table.tokenizer != "gpt2":
            said.append(
                f"the paper's perplexities are of GPT-2's tokens, ours of those of {table.tokenizer}: compare how rows "
                "differ, not their values"
            )
    return ["", *errors_of(table.rows), *said, *table.comparisons, *_measured(table.rows)]


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
