"""The columns of a table. Each is a field of `TableRow`, and holds all that the text, the CSV and the page say of it.

The CSV has every field, in this order. The text has the fields with a title, by their group and then in this order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from landmark.results import reducers
from landmark.results.reducers import Reducer, Source, mean, printed, provenance, setting


@dataclass(frozen=True)
class Column:
    """How the value of a column is made from a row's records, and how it is shown.

    Args:
        reduce: makes the value from the records of all seeds.
        title: head of the column; without one it is in the CSV only.
        cell: the format of the value, or makes the text of the cell from the row.
        meaning: what the value says, for the page's tooltip.
        unit: unit of the value, for the page's tooltip.
        always: whether it is shown where no row has a value.
        group: columns of a lower group stand before it in the text.
    """

    reduce: Reducer
    title: str = ""
    cell: Callable[["TableRow"], str] | str = ""
    meaning: str = ""
    unit: str = ""
    always: bool = False
    group: int = 1

    @property
    def tooltip(self) -> str:
        return ", ".join(part for part in (self.meaning, self.unit) if part)


def column(*parts: Any, **more: Any) -> Any:
    """A field of `TableRow`, with the `Column` that these arguments make."""
    return field(metadata={"column": Column(*parts, **more)})


def _perplexity_cell(row: "TableRow") -> str:
    """Perplexity ± its spread, to the digits that the spread leaves meaning."""
    if row.perplexity is None or row.spread is None:
        return _text(row.perplexity, ".2f")
    digits = 2 if row.spread >= 0.01 else 3 if row.spread >= 0.001 else 4
    return f"{row.perplexity:.{digits}f} ± {row.spread:.{digits}f}"


def _difference_cell(row: "TableRow") -> str:
    return "-" if row.difference is None else f"{row.difference:+.4f} ± {_text(row.difference_error, '.4f')}"


def _accuracy_cell(row: "TableRow") -> str:
    if row.accuracy is None:
        return "-"
    low, high = ("?" if bound is None else f"{100 * bound:.0f}" for bound in (row.accuracy_low, row.accuracy_high))
    return f"{100 * row.accuracy:.0f} % [{low}, {high}]"


def _recall_cell(key: str) -> Callable[["TableRow"], str]:
    """Percent of the texts, and the interval; chance has none."""

    def cell(row: "TableRow") -> str:
        share, interval = getattr(row, key), getattr(row, f"{key}_interval")
        if share is None or interval is None:
            return "-" if share is None else f"{100 * share:.3f} %"
        return f"{100 * share:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"

    return cell


def _drop_rate_cell(row: "TableRow") -> str:
    if row.drop_rate is None or row.drop_rate_spread is None:
        return _percent("drop_rate")(row)
    return f"{100 * row.drop_rate:.1f} ± {100 * row.drop_rate_spread:.1f} %"


def _percent(key: str) -> Callable[["TableRow"], str]:
    return lambda row: "-" if (share := getattr(row, key)) is None else f"{100 * share:.0f} %"


def _megabytes(key: str, form: str) -> Callable[["TableRow"], str]:
    return lambda row: "-" if (count := getattr(row, key)) is None else format(count / 1e6, form)


def _text(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


@dataclass(frozen=True)
class TableRow:
    """One row: a perplexity, or the accuracy of answers to prompts, or the ranks of texts that were looked for.

    Comments are for columns that the text does not show, or not by themselves.
    """

    name: str = column(
        lambda source: source.name, "row", meaning="name of the row in the experiment's file", always=True
    )
    model: str = column(setting("model"), "model", meaning="kind of model", always=True)
    length: int = column(setting("eval_length"), "length", meaning="evaluation length", unit="tokens", always=True)
    local: int = column(setting("local"), "local", meaning="tokens read at a time", always=True)
    blocks: int | None = column(setting("blocks"), "blocks", meaning="most blocks kept in memory")
    k: int | None = column(setting("k"), "k", meaning="blocks retrieved")
    granularity: str | None = column(setting("granularity"))  # what retrieves its own blocks: token, head or both
    scorer: str | None = column(setting("scorer"))  # what ranks the blocks
    attention_size: int | None = column(printed("attention_size", int), "attention size", meaning="the paper's column")
    keys_attended: float | None = column(
        mean("keys_attended"),
        "keys attended",
        ".0f",
        meaning="normal tokens that a query attends to, mean over queries",
    )
    perplexity: float | None = column(
        mean("perplexity"),
        "perplexity",
        _perplexity_cell,
        meaning="measured here, ± standard error over segments, or standard deviation over seeds",
    )
    spread: float | None = column(reducers.spread)  # of the perplexity, over segments or seeds
    paper: float | None = column(printed("perplexity_paper", float), "paper", ".2f", meaning="perplexity in the paper")
    poster: float | None = column(
        printed("perplexity_poster", float), "poster", ".2f", meaning="perplexity on the paper's poster"
    )
    against: str | None = column(lambda source: source.against if source.difference else None)
    difference: float | None = column(
        lambda source: source.difference and source.difference.nats,
        "vs first row, nats",
        _difference_cell,
        meaning="difference of the loss from the first row, paired on the same text, ± standard error",
        unit="nats a token",
    )
    difference_error: float | None = column(lambda source: source.difference and source.difference.error)
    accuracy: float | None = column(
        mean("accuracy"), "accuracy", _accuracy_cell, meaning="prompts answered, in brackets the 95 % interval", group=3
    )
    accuracy_low: float | None = column(reducers.accuracy_bound("accuracy_low", -1))
    accuracy_high: float | None = column(reducers.accuracy_bound("accuracy_high", 1))
    prompts: int | None = column(lambda source: source.results("prompts")[0])
    recall_at_1: float | None = column(
        mean("recall_at_1"),
        "recall@1",
        _recall_cell("recall_at_1"),
        meaning="texts whose place is ranked first, in brackets the 95 % interval",
        group=3,
    )
    recall_at_1_interval: tuple[float, float] | None = column(reducers.recall_interval("recall_at_1"))
    recall_at_10: float | None = column(
        mean("recall_at_10"),
        "recall@10",
        _recall_cell("recall_at_10"),
        meaning="texts whose place is among the first ten, in brackets the 95 % interval",
        group=3,
    )
    recall_at_10_interval: tuple[float, float] | None = column(reducers.recall_interval("recall_at_10"))
    median_rank: float | None = column(
        reducers.median_rank,
        "median rank",
        ",.0f",
        meaning="rank of the place, median over the texts of all seeds",
        group=3,
    )
    distinct_blocks: float | None = column(
        mean("retrieval", "distinct_blocks"),
        "distinct blocks",
        ".1f",
        meaning="different blocks that a chunk retrieves, mean over layers and samples",
        group=3,
    )
    bytes_moved: float | None = column(
        mean("retrieval", "bytes_moved"),
        "moved, MB",
        _megabytes("bytes_moved", ".1f"),
        meaning="keys and values to move to the device for a chunk, all layers",
        unit="megabytes",
        group=3,
    )
    bits_per_byte: float | None = column(
        mean("bits_per_byte"), "bits/byte", ".4f", meaning="loss a byte of text", unit="bits", group=3
    )
    word_perplexity: float | None = column(
        mean("word_perplexity"), "word ppl", ".4g", meaning="perplexity a word of text", group=3
    )
    tokens_per_second: float | None = column(
        mean("tokens_per_second"),
        "tokens/s",
        ",.0f",
        meaning="speed of the evaluation",
        unit="tokens a second",
        group=3,
    )
    seconds: float | None = column(mean("seconds"))
    peak_memory_bytes: float | None = column(mean("peak_memory_bytes"))
    resident_bytes: float | None = column(
        reducers.off_device(mean("peak_memory_bytes")),
        "peak, MB",
        _megabytes("resident_bytes", ",.0f"),
        meaning="most memory of the process, where blocks are kept off the device",
        unit="megabytes",
        group=4,
    )
    searching: float | None = column(
        reducers.off_device(reducers.searching),
        "searching",
        _percent("searching"),
        meaning="share of the time that the search for blocks took, where they are kept off the device",
        group=3,
    )
    cutoff: str | None = column(
        reducers.cutoff,
        "cutoff",
        meaning="cutoff of the context miss token, one for all layers or [one for each]",
        group=2,
    )
    drop_rate: float | None = column(
        mean("memory", "drop_rate"),
        "dropped",
        _drop_rate_cell,
        meaning="lookups that the context miss token drops, mean and standard deviation over seeds",
        group=2,
    )
    drop_rate_spread: float | None = column(reducers.drop_rate_spread)
    drop_rate_paper: float | None = column(
        printed("drop_rate_paper", float),
        "dropped, paper",
        _percent("drop_rate_paper"),
        meaning="lookups that the context miss token drops in the paper",
        group=2,
    )
    drop_rate_poster: float | None = column(
        printed("drop_rate_poster", float),
        "dropped, poster",
        _percent("drop_rate_poster"),
        meaning="lookups that the context miss token drops on the paper's poster",
        group=2,
    )
    mapping: str | None = column(
        setting("mapping"), "mapping", meaning="positions in memory, where they are not the stingy ones", group=2
    )
    note: str = column(lambda source: source.printed.get("note") or "")
    commit: str = column(provenance("commit"))
    hardware: str = column(provenance("hardware"))
    versions: str = column(provenance("versions"))
    command: str = column(provenance("command"))

    @classmethod
    def of(cls, source: Source) -> "TableRow":
        """The row that records make."""
        return cls(**{key: each.reduce(source) for key, each in COLUMNS.items()})

    @property
    def measured(self) -> str:
        """Where the numbers come from, in a sentence."""
        return f"measured at commit {self.commit} on {self.hardware} ({self.versions}) by `{self.command}`"

    @property
    def series(self) -> str:
        """The name that rows of different lengths share: all before the last underscore."""
        return self.name.rpartition("_")[0] or self.name

    def cell(self, key: str) -> str:
        """The text of a column."""
        form = COLUMNS[key].cell
        return _text(getattr(self, key), form) if isinstance(form, str) else form(self)


COLUMNS: dict[str, Column] = {each.name: each.metadata["column"] for each in fields(TableRow)}
