"""A table: named rows from their records, joined on the settings with the paper's numbers. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from landmark.experiment.config.schema import PanelConfig
from landmark.experiment.results.columns import Record, Source, TableRow, text_of
from landmark.experiment.results.paper import published
from landmark.utils.errors import UserError
from landmark.utils.measured import kind_of
from landmark.utils.significance import CHANCE, LEAST, Mean, Text, paired_difference

_SHOWN = 0.0001  # nats: the last digit of a difference
FIGURES = ("rows", "lines", "tasks", "unique_blocks")  # that `landmark.experiment.results.figures` draws


@dataclass(frozen=True)
class Table:
    """Rows in the experiment's order, the settings that they share, and sentences that compare pairs of them.

    records: of each row, one per seed. asked: names of all rows of the experiment, of which some may have no record
    yet; empty where these are all. panels: what the picture shows in place of `figure`. model: of transformers, by
    name; None: the rows are of ours, or of several. trial: few steps, whose numbers are compared with nothing.
    """

    name: str
    size: str
    data: str
    tokenizer: str
    split: str
    amount: str
    seeds: int
    rows: list[TableRow]
    comparisons: list[str] = field(default_factory=list)
    records: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    figure: str = "rows"
    asked: Sequence[str] = ()
    panels: Mapping[str, PanelConfig] = field(default_factory=dict)
    model: str | None = None
    trial: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether rows are missing."""
        return len(self.rows) < len(self.asked)

    @property
    def stem(self) -> str:
        return f"{self.size}-{self.data}-{self.tokenizer}"

    @property
    def published(self) -> bool:
        """Whether any row stands in the paper."""
        return any(row.paper is not None for row in self.rows)

    @property
    def settings(self) -> str:
        """Model and text, for titles."""
        model = f"size {self.size}" if self.model is None else self.model
        return f"{model}, data {self.data}, tokenizer {self.tokenizer}"

    @property
    def header(self) -> str:
        interval = "; in brackets the 95 % interval" if any(row.accuracy is not None for row in self.rows) else ""
        trial = "a trial, whose numbers say nothing: " if self.trial else ""
        part = f", {len(self.rows)} of {len(self.asked)} rows" if self.is_partial else ""
        return f"{trial}{self.name}{part}: {self.settings}; {self.split} split, {self.amount}{interval}"


def check_figure(name: str) -> None:
    """Raise UserError where there is no such figure."""
    if name not in FIGURES:
        raise UserError(f"figure={name}: must be one of {', '.join(FIGURES)}")


def build(
    name: str,
    rows: Mapping[str, Sequence[Record]],
    paper: Sequence[dict[str, str]] = (),
    comparisons: Mapping[str, Sequence[str]] | None = None,
    figure: str = "rows",
    asked: Sequence[str] = (),
    panels: Mapping[str, PanelConfig] | None = None,
    trial: bool = False,
) -> Table:
    """The table of an experiment. paper: as `read_paper` returns it. comparisons: title to the names of two rows, which
    count where both have records. figure: one of `FIGURES`; a row is compared with the first that measures the same,
    with "lines" at its length; trial: with nothing. Raises UserError where there are no rows, or where two of the
    paper's rows have a row's settings.
    """
    if not rows:
        raise UserError(f"{name}: there are no rows to show")
    first = next(iter(rows.values()))[0]
    rows = {row: _different(records) for row, records in rows.items()}
    text = text_of([record for records in rows.values() for record in records])
    built = []
    for row, records in rows.items():
        base = _first_like(rows, records, same_length=figure == "lines")
        difference = None if trial or row == base else _difference(records, rows[base], text)
        printed = {} if trial else published(records[0], paper)
        built.append(TableRow.of(Source(row, records, printed, base, difference, text)))
    return Table(
        name=name,
        size=first["labels"]["size"],
        data=first["labels"]["data"],
        tokenizer=first["labels"]["tokenizer"],
        split=first["settings"]["split"],
        amount=_amount([record["results"] for records in rows.values() for record in records]),
        seeds=max(map(len, rows.values())),
        rows=built,
        comparisons=[
            compare(title, a, b, _difference(rows[a], rows[b], text))
            for title, (a, b) in (comparisons or {}).items()
            if a in rows and b in rows and not trial
        ],
        records=rows,
        figure=figure,
        panels=panels or {},
        asked=asked,
        model=_model([record for records in rows.values() for record in records]),
        trial=trial,
    )


def _different(records: Sequence[Record]) -> list[Record]:
    """Those of different identities: where nothing depends on the seed, all seeds have one record."""
    return list({record["id"]: record for record in records}.values())


def compare(title: str, a: str, b: str, difference: Mean | None) -> str:
    """A sentence on the difference a - b of two rows' losses (of seeds their mean), of which a is expected to be the
    better: it is shown if by each of its errors it is improbable by chance. None: they were not measured on the same
    text.
    """
    if difference is None:
        return f"{title}: {a} and {b} were not measured on the same text, and cannot be paired."
    nats, chance = difference.nats, difference.chance
    if abs(nats) < _SHOWN / 2:
        verdict = f"{a} and {b} do not differ by {_SHOWN} nats"
    elif chance is None:
        verdict = f"{a} has a {'lower' if nats < 0 else 'higher'} loss than {b}, on too little text for an error"
    elif chance >= CHANCE:
        verdict = f"{a} is NOT shown to be better than {b}"
    else:
        verdict = f"{a} is {'better' if nats < 0 else 'WORSE'} than {b}"
    errors = [f"± {error.value:.4f} over {error.over}, {_chance(error.chance(nats))}" for error in difference.errors]
    return f"{title}: {verdict} ({'; '.join([f'{nats:+.4f} nats a token', *errors])})."


def _chance(p: float | None) -> str:
    return "" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def errors_of(rows: Sequence[TableRow]) -> list[str]:
    """What ± means, for the foot of a table."""
    losses = [row for row in rows if row.units is not None]
    seeds = sorted({row.seeds for row in losses if row.seeds > 1})
    text = {row.units: row.text_spread is not None for row in losses if row.units is not None}
    said = [f"over {' or '.join(map(str, seeds))} seeds"] if seeds else []
    if known := [units for units, has_error in text.items() if has_error]:
        said.append(f"{'of the text, in the CSV, ' if seeds else ''}over {' or '.join(known)}")
    few = [units for units, has_error in text.items() if not has_error]
    lines = [f"± is a standard error: {'; '.join(said)}"] if said else []
    if few:
        lines.append(f"no error of the text over {' or '.join(few)}: {LEAST} are the least")
    return lines


def _first_like(rows: Mapping[str, Sequence[Record]], records: Sequence[Record], *, same_length: bool) -> str:
    """The first row that measures the same kind of thing; same_length: and at the same length."""

    def like(record: Record) -> tuple[Any, ...]:
        return kind_of(record["results"]), same_length and record["settings"]["eval_length"]

    return next(name for name, others in rows.items() if like(others[0]) == like(records[0]))


def _difference(rows: Sequence[Record], others: Sequence[Record], text: Text) -> Mean | None:
    """Difference of two rows, paired seed by seed, or a row of one seed with each of the other's."""
    if len({1, len(rows), len(others)}) > 2 or len({kind_of(record["results"]) for record in [*rows, *others]}) > 1:
        return None
    if any("segments" not in record["results"] for record in [*rows, *others]):
        return None
    row, other = ([record["results"]["segments"] for record in records] for records in (rows, others))
    return paired_difference(row, other, text)


def _model(records: Sequence[Record]) -> str | None:
    """The name of the model of transformers that all rows name, without its folder."""
    key = "model.name="
    given = [[word for word in record["labels"].get("overrides", ()) if word.startswith(key)] for record in records]
    names = {PurePath(words[-1].removeprefix(key)).name if words else None for words in given}
    return names.pop() if len(names) == 1 else None


def _amount(results: Sequence[Record]) -> str:
    """How much was evaluated: prompts where nothing else was, else tokens."""
    unit = "prompts" if all("prompts" in each for each in results) else "tokens"
    counts = sorted({each[unit] for each in results if unit in each})
    return f"{counts[0]:,} {unit}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} {unit}"
