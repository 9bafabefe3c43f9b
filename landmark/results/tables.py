"""A table: named rows from their records, joined on the settings with what the paper printed. No torch."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from landmark.results.paper import published
from landmark.utils.errors import UserError
from landmark.utils.significance import paired_difference

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
    """One row: a perplexity, or the accuracy of answers to prompts.

    perplexity, accuracy: means over seeds. spread: the perplexity's standard error over segments (one seed) or
    standard deviation over seeds. accuracy_low, accuracy_high: its 95 % interval (one seed) or a standard deviation
    either way. recall_at_1, recall_at_10, median_rank: of texts whose place is looked for, with 95 % intervals.
    against: the row from which `difference` is taken, paired on the same text, in nats a token. drop_rate: the share
    of lookups that the context miss token drops, mean over seeds, with its standard deviation. mapping: of positions
    in memory, where it is not the stingy one. distinct_blocks: mean over layers and samples; bytes_moved: for a
    chunk, all layers (see `landmark.evaluation.retrieval_statistics`). resident_bytes: the peak of the process,
    searching: the share of the time that searching for blocks took, of rows whose blocks are not kept on the device.
    """

    name: str
    model: str
    length: int
    local: int
    blocks: int | None
    k: int | None
    granularity: str | None
    scorer: str | None
    attention_size: int | None  # the paper's column
    keys_attended: float | None  # mean over queries
    perplexity: float | None
    spread: float | None
    paper: float | None
    poster: float | None
    against: str | None
    difference: float | None
    difference_error: float | None
    accuracy: float | None
    accuracy_low: float | None
    accuracy_high: float | None
    prompts: int | None
    recall_at_1: float | None
    recall_at_1_interval: tuple[float, float] | None
    recall_at_10: float | None
    recall_at_10_interval: tuple[float, float] | None
    median_rank: float | None
    distinct_blocks: float | None
    bytes_moved: float | None
    bits_per_byte: float | None
    word_perplexity: float | None
    tokens_per_second: float | None
    seconds: float | None
    peak_memory_bytes: float | None
    resident_bytes: float | None
    searching: float | None
    cutoff: str | None  # of the context miss token; [c, …] for each layer
    drop_rate: float | None
    drop_rate_spread: float | None
    drop_rate_paper: float | None
    drop_rate_poster: float | None
    mapping: str | None
    note: str
    commit: str
    hardware: str
    versions: str
    command: str

    @property
    def measured(self) -> str:
        """Where the numbers come from, in a sentence."""
        return f"measured at commit {self.commit} on {self.hardware} ({self.versions}) by `{self.command}`"

    @property
    def series(self) -> str:
        """What the row is one length of: its name before the last underscore."""
        return self.name.rpartition("_")[0] or self.name


@dataclass(frozen=True)
class Table:
    """Rows in the experiment's order, what they have in common, and sentences that compare pairs of them.

    records: of each row, one per seed. cells: of those rows that make up a grid, the value on each axis.
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
    cells: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        return f"{self.size}-{self.data}-{self.tokenizer}"

    @property
    def published(self) -> bool:
        """Whether any row stands in the paper."""
        return any(row.paper is not None for row in self.rows)

    @property
    def header(self) -> str:
        if self.seeds > 1:
            spread = f"± standard deviation over {self.seeds} seeds"
        elif all(row.perplexity is None for row in self.rows):
            spread = "in brackets the 95 % interval"
        else:
            spread = "± standard error over segments"
        return (
            f"{self.name}: size {self.size}, data {self.data}, tokenizer {self.tokenizer}; "
            f"{self.split} split, {self.amount}; {spread}"
        )


def build(
    name: str,
    rows: Mapping[str, Sequence[Record]],
    paper: Sequence[dict[str, str]] = (),
    comparisons: Mapping[str, Sequence[str]] | None = None,
    paired: Paired = lambda a, b: None,
    figure: str = "rows",
    cells: Mapping[str, Mapping[str, str]] | None = None,
) -> Table:
    """The table of an experiment.

    rows: records of each name, one per seed. paper: rows of `read_paper`. comparisons: title to two names, left out
    where one of them has no records. paired: compares two records. figure: of `results.figures`; with
    "lines" rows are compared with the first of their length, else with the first of all. Raises UserError where two of
    the paper's rows have the settings of one row.
    """
    if not rows:
        raise UserError(f"{name}: there are no rows to show")
    first = next(iter(rows.values()))[0]
    built = []
    for row, records in rows.items():
        base = _base(rows, records) if figure == "lines" else next(iter(rows))
        built.append(_row(row, records, paper, base, rows[base], paired))
    return Table(
        name=name,
        size=first["labels"]["size"],
        data=first["labels"]["data"],
        tokenizer=first["labels"]["tokenizer"],
        split=first["settings"]["split"],
        amount=_amount([record["results"] for records in rows.values() for record in records]),
        seeds=len(next(iter(rows.values()))),
        rows=built,
        comparisons=[
            compare(title, a, b, *_differences(rows[a], rows[b], paired))
            for title, (a, b) in (comparisons or {}).items()
            if a in rows and b in rows
        ],
        records=rows,
        figure=figure,
        cells=cells or {},
    )


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


def _base(rows: Mapping[str, Sequence[Record]], records: Sequence[Record]) -> str:
    """The first row that is evaluated at the same length."""
    length = records[0]["settings"]["eval_length"]
    return next(name for name, others in rows.items() if others[0]["settings"]["eval_length"] == length)


def _row(
    name: str,
    records: Sequence[Record],
    paper: Sequence[dict[str, str]],
    base: str,
    others: Sequence[Record],
    paired: Paired,
) -> TableRow:
    settings, results = records[0]["settings"], records[0]["results"]
    printed = published(records[0], paper)
    difference = None if name == base else _differences(records, others, paired)[0]
    low, high = _interval(records)
    return TableRow(
        name=name,
        model=settings["model"],
        length=settings["eval_length"],
        local=settings["local"],
        blocks=settings.get("blocks"),
        k=settings.get("k"),
        granularity=settings.get("granularity"),
        scorer=settings.get("scorer"),
        attention_size=_number(printed.get("attention_size"), int),
        keys_attended=_mean(records, "keys_attended"),
        perplexity=_mean(records, "perplexity"),
        spread=results.get("perplexity_se") if len(records) == 1 else _deviation(records, "perplexity"),
        paper=_number(printed.get("perplexity_paper"), float),
        poster=_number(printed.get("perplexity_poster"), float),
        against=None if difference is None else base,
        difference=None if difference is None else difference.nats,
        difference_error=None if difference is None else difference.error,
        accuracy=_mean(records, "accuracy"),
        accuracy_low=low,
        accuracy_high=high,
        prompts=results.get("prompts"),
        recall_at_1=_mean(records, "recall_at_1"),
        recall_at_1_interval=_recall_interval(records, "recall_at_1"),
        recall_at_10=_mean(records, "recall_at_10"),
        recall_at_10_interval=_recall_interval(records, "recall_at_10"),
        median_rank=_median_rank(records),
        distinct_blocks=_retrieved(records, "distinct_blocks"),
        bytes_moved=_retrieved(records, "bytes_moved"),
        bits_per_byte=_mean(records, "bits_per_byte"),
        word_perplexity=_mean(records, "word_perplexity"),
        tokens_per_second=_mean(records, "tokens_per_second"),
        seconds=_mean(records, "seconds"),
        peak_memory_bytes=_mean(records, "peak_memory_bytes"),
        resident_bytes=_mean(records, "peak_memory_bytes") if _fetched(records) else None,
        searching=_searching(records) if _fetched(records) else None,
        cutoff=_cutoff(settings, results),
        drop_rate=_dropped(records, statistics.fmean),
        drop_rate_spread=_dropped(records, statistics.stdev) if len(records) > 1 else None,
        drop_rate_paper=_number(printed.get("drop_rate_paper"), float),
        drop_rate_poster=_number(printed.get("drop_rate_poster"), float),
        mapping=settings.get("mapping"),
        note=printed.get("note") or "",
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
    if any("segments" not in record["results"] for record in [*rows, *others]):
        return None, len(rows)
    found = [paired(a, b) for a, b in zip(rows, others, strict=True)]
    each = [difference for difference in found if difference is not None]
    if len(each) < len(rows):
        return None, len(rows)
    if len(each) == 1:
        return each[0], 1
    values = [difference.nats for difference in each]
    error = statistics.stdev(values) / len(values) ** 0.5
    return Difference(statistics.fmean(values), error, each[0].stretches), len(each)


def _amount(results: Sequence[Record]) -> str:
    """How much was evaluated: prompts where there are any, else tokens."""
    unit = "prompts" if all("prompts" in each for each in results) else "tokens"
    counts = sorted({each[unit] for each in results})
    return f"{counts[0]:,} {unit}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} {unit}"


def _interval(records: Sequence[Record]) -> tuple[float | None, float | None]:
    """Bounds of the accuracy: of one seed as its record has them, of several a standard deviation either way."""
    accuracy = _mean(records, "accuracy")
    if accuracy is None or len(records) == 1:
        return _mean(records, "accuracy_low"), _mean(records, "accuracy_high")
    deviation = _deviation(records, "accuracy")
    return max(0.0, accuracy - deviation), min(1.0, accuracy + deviation)


def _recall_interval(records: Sequence[Record], key: str) -> tuple[float, float] | None:
    """As the record of one seed has it."""
    interval = records[0]["results"].get(f"{key}_interval")
    return None if interval is None or len(records) > 1 else (interval[0], interval[1])


def _median_rank(records: Sequence[Record]) -> float | None:
    """Of the texts of all seeds."""
    ranks = [rank for record in records for rank in record["results"].get("ranks", [])]
    return statistics.median(ranks) if ranks else None


def _retrieved(records: Sequence[Record], key: str) -> float | None:
    """Mean of a statistic of the retrieval, where it was taken."""
    statistic = [record["results"].get("retrieval") for record in records]
    return None if None in statistic else statistics.fmean(each[key] for each in statistic if each)


def _fetched(records: Sequence[Record]) -> bool:
    """Whether blocks were fetched from another tier than the device."""
    return all("cache_hits" in record["results"].get("memory", {}) for record in records)


def _searching(records: Sequence[Record]) -> float:
    results = [record["results"] for record in records]
    return statistics.fmean(each["memory"]["seconds_searching"] / each["seconds"] for each in results)


def _cutoff(settings: Record, results: Record) -> str | None:
    """As it was set, or as it was chosen for each layer."""
    chosen = results.get("cutoffs", settings.get("cmt_cutoff"))
    return None if chosen is None else str(chosen)


def _dropped(records: Sequence[Record], reduce: Callable[[list[float]], float]) -> float | None:
    rates = [record["results"].get("memory", {}).get("drop_rate") for record in records]
    return None if None in rates else reduce(rates)


def _deviation(records: Sequence[Record], key: str) -> float:
    return statistics.stdev(record["results"].get(key, 0.0) for record in records)


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [record["results"].get(key) for record in records]
    return None if any(value is None for value in values) else statistics.fmean(values)


def _number(text: str | None, kind: type) -> Any:
    return kind(text) if text else None


def paired_records(a: Record, b: Record) -> Difference | None:
    """Difference of two rows on the same text; None where they did not read the same."""
    found = paired_difference(a["results"]["segments"], b["results"]["segments"])
    return None if found is None else Difference(found.nats, found.error, found.stretches)
