"""A table: named rows from their records, joined on the settings with what the paper printed. No torch."""

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from landmark.errors import UserError
from landmark.lab.provenance import ROOT

# The settings by which our rows and the paper's are matched.
JOINED = ("model", "block_size", "eval_length", "local", "cache", "blocks", "k", "granularity")

Record = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Mean loss of one row less another's on the same text, nats a token, and its standard error."""

    nats: float
    error: float
    stretches: int


Paired = Callable[[Record, Record], Difference | None]


@dataclass(frozen=True)
class TableRow:
    """One row.

    perplexity: mean over seeds; spread: its standard error over segments (one seed) or standard deviation
    over seeds. difference: from the table's first row, paired on the same text, in nats a token.
    """

    name: str
    model: str
    length: int
    local: int
    blocks: int | None
    k: int | None
    attention_size: int | None  # the paper's column
    keys_attended: float | None  # mean over queries
    perplexity: float
    spread: float | None
    paper: float | None
    poster: float | None
    difference: float | None
    difference_error: float | None
    bits_per_byte: float | None
    word_perplexity: float | None
    tokens_per_second: float | None
    seconds: float | None
    peak_memory_bytes: float | None
    note: str
    commit: str
    hardware: str
    versions: str
    command: str

    @property
    def measured(self) -> str:
        """Where the numbers come from, in a sentence."""
        return f"measured at commit {self.commit} on {self.hardware} ({self.versions}) by `{self.command}`"


@dataclass(frozen=True)
class Table:
    """Rows in the experiment's order, what they have in common, and sentences that compare pairs of them."""

    name: str
    size: str
    data: str
    tokenizer: str
    split: str
    tokens: str
    seeds: int
    rows: list[TableRow]
    comparisons: list[str] = field(default_factory=list)

    @property
    def stem(self) -> str:
        return f"{self.size}-{self.data}-{self.tokenizer}"

    @property
    def published(self) -> bool:
        """Whether any row stands in the paper."""
        return any(row.paper is not None for row in self.rows)

    @property
    def header(self) -> str:
        spread = "standard error over segments"
        if self.seeds > 1:
            spread = f"standard deviation over {self.seeds} seeds"
        return (
            f"{self.name}: size {self.size}, data {self.data}, tokenizer {self.tokenizer}; "
            f"{self.split} split, {self.tokens} tokens; ± {spread}"
        )


def build(
    name: str,
    rows: Mapping[str, Sequence[Record]],
    paper: Sequence[dict[str, str]] = (),
    comparisons: Mapping[str, Sequence[str]] | None = None,
    paired: Paired = lambda a, b: None,
) -> Table:
    """The table of an experiment.

    rows: records of each name, one per seed. paper: rows of `read_paper`. comparisons: title to two names.
    paired: compares two records. Raises UserError where two of the paper's rows have the settings of one row.
    """
    if not rows:
        raise UserError(f"{name}: there are no rows to show")
    base = next(iter(rows.values()))
    labels, settings = base[0]["labels"], base[0]["settings"]
    counts = sorted({record["results"]["tokens"] for records in rows.values() for record in records})
    return Table(
        name=name,
        size=labels["size"],
        data=labels["data"],
        tokenizer=labels["tokenizer"],
        split=settings["split"],
        tokens=f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}",
        seeds=len(base),
        rows=[_row(row, records, paper, base, paired) for row, records in rows.items()],
        comparisons=[
            compare(title, a, b, *_differences(rows[a], rows[b], paired))
            for title, (a, b) in (comparisons or {}).items()
        ],
    )


def read_paper(name: str, folder: Path = ROOT / "experiments") -> list[dict[str, str]]:
    """What the paper printed, from experiments/<name>/paper.csv; empty where there is none."""
    path = folder / name / "paper.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [key for key in (*JOINED, "dataset", "perplexity_paper") if rows and key not in rows[0]]
    if missing:
        raise UserError(f"{path}: column {', '.join(missing)} is missing")
    return rows


def compare(title: str, a: str, b: str, difference: Difference | None, seeds: int = 1) -> str:
    """A sentence on the difference a - b of two rows, of which a is expected to be the better."""
    if difference is None:
        return f"{title}: {a} and {b} were not measured on the same text, and cannot be paired."
    nats, error = difference.nats, difference.error
    over = f"{difference.stretches} stretches of text" if seeds == 1 else f"{seeds} seeds"
    if nats < -2 * error:
        verdict = f"{a} is better than {b} by more than two standard errors"
    elif nats > 2 * error:
        verdict = f"{a} is WORSE than {b} by more than two standard errors"
    else:
        verdict = f"{a} is NOT better than {b} by two standard errors at this size"
    return f"{title}: {verdict} ({nats:+.4f} ± {error:.4f} nats a token, paired over {over})."


def _row(
    name: str,
    records: Sequence[Record],
    paper: Sequence[dict[str, str]],
    base: Sequence[Record],
    paired: Paired,
) -> TableRow:
    settings, results = records[0]["settings"], records[0]["results"]
    published = _published(records[0], paper)
    perplexities = [record["results"]["perplexity"] for record in records]
    difference = None if records is base else _differences(records, base, paired)[0]
    return TableRow(
        name=name,
        model=settings["model"],
        length=settings["eval_length"],
        local=settings["local"],
        blocks=settings.get("blocks"),
        k=settings.get("k"),
        attention_size=_number(published.get("attention_size"), int),
        keys_attended=_mean(records, "keys_attended"),
        perplexity=statistics.fmean(perplexities),
        spread=results.get("perplexity_se") if len(records) == 1 else statistics.stdev(perplexities),
        paper=_number(published.get("perplexity_paper"), float),
        poster=_number(published.get("perplexity_poster"), float),
        difference=None if difference is None else difference.nats,
        difference_error=None if difference is None else difference.error,
        bits_per_byte=_mean(records, "bits_per_byte"),
        word_perplexity=_mean(records, "word_perplexity"),
        tokens_per_second=_mean(records, "tokens_per_second"),
        seconds=_mean(records, "seconds"),
        peak_memory_bytes=_mean(records, "peak_memory_bytes"),
        note=published.get("note") or "",
        **_source(records[0]["provenance"]),
    )


def _source(provenance: Record) -> dict[str, str]:
    hardware = provenance["hardware"]
    versions = {name: version for name, version in provenance["versions"].items() if version}
    return {
        "commit": (provenance["commit"] or "unknown")[:10],
        "hardware": ", ".join([*hardware.get("gpus", []), f"{hardware['cpu']}, {hardware['cores']} cores"]),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch") if name in versions),
        "command": f"python {provenance['command']}",
    }


def _differences(rows: Sequence[Record], others: Sequence[Record], paired: Paired) -> tuple[Difference | None, int]:
    """Difference of two rows seed by seed: the mean and, of several, its standard error over seeds."""
    found = [paired(a, b) for a, b in zip(rows, others, strict=True)]
    each = [difference for difference in found if difference is not None]
    if len(each) < len(rows):
        return None, len(rows)
    if len(each) == 1:
        return each[0], 1
    values = [difference.nats for difference in each]
    error = statistics.stdev(values) / len(values) ** 0.5
    return Difference(statistics.fmean(values), error, each[0].stretches), len(each)


def _published(record: Record, paper: Sequence[dict[str, str]]) -> dict[str, str]:
    """The paper's row with a record's settings, or nothing; it has no ablations of the retrieval."""
    settings = record["labels"] | record["settings"]
    if settings.get("scorer", "landmark") != "landmark":
        return {}
    ours = {key: "" if settings.get(key) is None else str(settings[key]) for key in JOINED}
    ours["dataset"] = settings["data"]
    found = [row for row in paper if all(row[key] == value for key, value in ours.items())]
    if len(found) > 1:
        raise UserError(f"paper.csv has {len(found)} rows with the same settings: {ours}")
    return found[0] if found else {}


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [record["results"].get(key) for record in records]
    return None if any(value is None for value in values) else statistics.fmean(values)


def _number(text: str | None, kind: type) -> Any:
    return kind(text) if text else None
