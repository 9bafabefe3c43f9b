"""The columns of a table, fields of `TableRow`: all that the text and the CSV say of each. The CSV has all in
this order; the text those with a title, by group. Values are made from a row's records, one for each seed.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from landmark.utils.errors import counted
from landmark.utils.measured import TEXT, kind_of
from landmark.utils.significance import Error, Mean, Text, mean_loss, over_seeds, score_interval

Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """What a row is made of. records: one per seed. printed: the paper's row with these settings, or nothing.
    difference: from the row `against`, paired on the same text; None where the texts differ. text: what its units can
    be.
    """

    name: str
    records: Sequence[Record]
    printed: dict[str, str]
    against: str
    difference: Mean | None
    text: Text

    def results(self, *keys: str) -> list[Any]:
        """A result of every seed, which these keys lead to; None where it is missing."""
        found: list[Any] = [record["results"] for record in self.records]
        for key in keys:
            found = [None if each is None else each.get(key) for each in found]
        return found

    def mean(self, *keys: str) -> float | None:
        """The mean of a result over seeds; None where a seed lacks it."""
        found = self.results(*keys)
        return None if None in found else statistics.fmean(found)

    def over_seeds(self, *keys: str) -> Error | None:
        """The error of a result over seeds; None where there is one, or a seed lacks the result."""
        found = self.results(*keys)
        return None if None in found else over_seeds(found)

    def loss(self, segments: str = "segments") -> Mean | None:
        """The mean loss; None where a record has no segments."""
        found = self.results(segments)
        return None if None in found else mean_loss(found, self.text)


def text_of(records: Sequence[Record]) -> Text:
    """What the units of a text can be, for all rows: documents where all records know theirs; spans that are no shorter
    than a row's segments.
    """
    read = [record for record in records if "segments" in record["results"]]
    settings = [record["settings"] for record in read]
    span = max([Text.span, *(max(each.get("span") or 0, each["eval_length"]) for each in settings)])
    documents = [record["results"].get("documents") for record in read]
    return Text(span, None if None in documents else sorted(set().union(*documents)))


Reducer = Callable[[Source], Any]


def setting(key: str) -> Reducer:
    """A setting, the same for all seeds."""
    return lambda source: source.records[0]["settings"].get(key)


def mean(*keys: str) -> Reducer:
    """Mean of a result over seeds."""
    return lambda source: source.mean(*keys)


def error_of_loss(segments: str) -> Reducer:
    """Standard error of a mean loss: over seeds, of one over the text."""
    return lambda source: (found := source.loss(segments)) and found.error


def error_of_perplexity(source: Source) -> float | None:
    """The same of the perplexity."""
    if (error := source.over_seeds("perplexity")) is not None:
        return error.value
    return text_error_of_perplexity(source)


def text_error_of_perplexity(source: Source) -> float | None:
    """Over units of the text, of the seeds' mean."""
    loss, perplexity = source.loss(), source.mean("perplexity")
    return None if loss is None or perplexity is None or loss.text.value is None else perplexity * loss.text.value


def bound_of_accuracy(bound: int) -> Reducer:
    """A bound of the 95 % interval of the accuracy."""

    def reduce(source: Source) -> float | None:
        if source.mean("accuracy") is None:
            return None
        if len(source.records) == 1:
            return source.results(("accuracy_low", "accuracy_high")[bound])[0]
        results = [record["results"] for record in source.records]
        return score_interval([[each["accuracy"]] * each["prompts"] for each in results])[bound]

    return reduce


def off_device(reduce: Reducer) -> Reducer:
    """Only of rows whose blocks were kept on another tier than the device."""
    return lambda source: None if None in source.results("memory", "cache_hits") else reduce(source)


def share_of_searching(source: Source) -> float:
    """Share of the time that the search for blocks took."""
    shares = zip(source.results("memory", "seconds_searching"), source.results("seconds"), strict=True)
    return statistics.fmean(searching / seconds for searching, seconds in shares)


def tokens_read(source: Source) -> float | None:
    """Tokens of a prompt as the model reads it, mean, with those that begin a text and without the answer."""
    if kind_of(source.records[0]["results"]) != "answers" or None in source.results("tokens"):
        return None
    return statistics.fmean(each / source.results("prompts")[0] for each in source.results("tokens"))


def printed(key: str, kind: type) -> Reducer:
    """A number of the paper's."""
    return lambda source: kind(text) if (text := source.printed.get(key)) else None


def provenance(key: str) -> Reducer:
    """Commit, hardware, versions or command of the first seed's record, as a text."""

    def reduce(source: Source) -> str:
        made = source.records[0]["provenance"]
        hardware, versions = made["hardware"], made["versions"]
        cores = counted(hardware["cores"], "core")
        return {
            "commit": (made["commit"] or "unknown")[:10],
            "hardware": ", ".join([*hardware.get("gpus", []), f"{hardware['cpu']}, {cores}"]),
            "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch") if versions.get(name)),
            "command": made["command"],
        }[key]

    return reduce


@dataclass(frozen=True)
class Column:
    """How the value of a column is made from records (`reduce`), and shown. title: without one it is in the CSV only.
    cell: a format, or makes the text. group: columns of a lower one stand before it.
    """

    reduce: Reducer
    title: str = ""
    cell: Callable[[Any, "TableRow"], str] | str = ""
    group: int = 1


def column(*parts: Any, **more: Any) -> Any:
    """A field of `TableRow`, with the `Column` that these arguments make."""
    return field(metadata={"column": Column(*parts, **more)})


def _copy(which: str) -> Any:
    """A column of the loss on the first or the second copy, nats a token, and its spread."""

    def cell(nats: float, row: "TableRow") -> str:
        spread = getattr(row, f"{which}_copy_spread")
        return f"{nats:.4f}" if spread is None else f"{nats:.4f} ± {spread:.4f}"

    return column(mean(f"{which}_copy"), f"{which} copy, nats", cell)


def _perplexity(value: float, row: "TableRow") -> str:
    """Perplexity ± its error, to the digits that the error leaves meaning; of probes other columns say it."""
    if row.measured not in (TEXT, "hidden"):
        return "-"
    if row.spread is None:
        return f"{value:.2f}"
    digits = 2 if row.spread >= 0.01 else 3 if row.spread >= 0.001 else 4
    return f"{value:.{digits}f} ± {row.spread:.{digits}f}"


def _word_perplexity(value: float, _: "TableRow") -> str:
    """A word of a model that has learned nothing yet has a number that says nothing."""
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}" if value < 1e6 else "over 1e6"


def _difference(value: float, row: "TableRow") -> str:
    return f"{value:+.4f}" if row.difference_error is None else f"{value:+.4f} ± {row.difference_error:.4f}"


def _accuracy(value: float, row: "TableRow") -> str:
    low, high = ("?" if bound is None else f"{100 * bound:.0f}" for bound in (row.accuracy_low, row.accuracy_high))
    return f"{100 * value:.0f} % [{low}, {high}]"


def _drop_rate(value: float, row: "TableRow") -> str:
    if row.drop_rate_spread is None:
        return _percent(value, row)
    return f"{100 * value:.1f} ± {100 * row.drop_rate_spread:.1f} %"


def _percent(value: float, _: "TableRow") -> str:
    return f"{100 * value:.0f} %"


def _megabytes(form: str) -> Any:
    return lambda count, _: format(count / 1e6, form)


@dataclass(frozen=True)
class TableRow:
    """One row: a perplexity, a probe, or accuracy."""

    name: str = column(lambda row: row.name, "row")
    model: str = column(setting("model"), "model")
    length: int = column(setting("eval_length"), "length")  # of an evaluation, tokens
    local: int = column(setting("local"), "local")  # tokens read at a time
    blocks: int | None = column(setting("blocks"), "blocks")  # most kept in memory
    k: int | None = column(setting("k"), "k")
    granularity: str | None = column(setting("granularity"))  # what retrieves its own blocks: token, head or both
    scorer: str | None = column(setting("scorer"))  # what ranks the blocks
    measured: str = column(lambda row: kind_of(row.records[0]["results"]))  # one of `KINDS`
    attention_size: int | None = column(printed("attention_size", int), "attention size")  # the paper's column
    # Normal tokens that a query attends to, mean over queries.
    keys_attended: float | None = column(mean("keys_attended"), "keys attended", ".0f")
    perplexity: float | None = column(mean("perplexity"), "perplexity", _perplexity)
    spread: float | None = column(error_of_perplexity)  # its standard error over seeds, of one over the text
    text_spread: float | None = column(text_error_of_perplexity)
    units: str | None = column(lambda row: (loss := row.loss()) and loss.text.over)  # of the text
    paper: float | None = column(printed("perplexity_paper", float), "paper", ".2f")
    poster: float | None = column(printed("perplexity_poster", float), "poster", ".2f")
    against: str | None = column(lambda row: row.against if row.difference else None)
    # Of the loss from the first row that measures the same, paired on the same text.
    difference: float | None = column(
        lambda row: row.difference and row.difference.nats, "vs first row, nats", _difference
    )
    difference_error: float | None = column(lambda row: row.difference and row.difference.error)
    difference_text_error: float | None = column(lambda row: row.difference and row.difference.text.value)
    first_copy: float | None = _copy("first")
    first_copy_spread: float | None = column(error_of_loss("first_segments"))
    second_copy: float | None = _copy("second")
    second_copy_spread: float | None = column(
        lambda row: None if row.mean("second_copy") is None else error_of_loss("segments")(row)
    )
    # Prompts answered, with the 95 % interval.
    accuracy: float | None = column(mean("accuracy"), "accuracy", _accuracy, group=3)
    accuracy_low: float | None = column(bound_of_accuracy(0))
    accuracy_high: float | None = column(bound_of_accuracy(1))
    prompts: int | None = column(lambda row: row.results("prompts")[0])
    tokens_read: float | None = column(tokens_read, "tokens read", ",.0f", group=3)  # of a prompt, mean
    # Of a chunk, mean over layers and samples.
    distinct_blocks: float | None = column(mean("retrieval", "distinct_blocks"), "distinct blocks", ".1f", group=3)
    # Keys and values to move to the device for a chunk, all layers.
    bytes_moved: float | None = column(mean("retrieval", "bytes_moved"), "moved, MB", _megabytes(".1f"), group=3)
    bits_per_byte: float | None = column(mean("bits_per_byte"), "bits/byte", ".4f", group=3)
    word_perplexity: float | None = column(mean("word_perplexity"), "word ppl", _word_perplexity, group=3)
    tokens_per_second: float | None = column(mean("tokens_per_second"), "tokens/s", ",.0f", group=3)
    seconds: float | None = column(mean("seconds"))
    peak_memory_bytes: float | None = column(mean("peak_memory_bytes"))
    resident_bytes: float | None = column(
        off_device(mean("peak_memory_bytes")), "peak, MB", _megabytes(",.0f"), group=4
    )
    searching: float | None = column(off_device(share_of_searching), "searching", _percent, group=3)
    cutoff: float | None = column(setting("cmt_cutoff"), "cutoff", group=2)  # of the context miss token
    drop_rate: float | None = column(mean("memory", "drop_rate"), "dropped", _drop_rate, group=2)
    drop_rate_spread: float | None = column(
        lambda row: (error := row.over_seeds("memory", "drop_rate")) and error.value
    )
    drop_rate_paper: float | None = column(printed("drop_rate_paper", float), "dropped, paper", _percent, group=2)
    drop_rate_poster: float | None = column(printed("drop_rate_poster", float), "dropped, poster", _percent, group=2)
    mapping: str | None = column(setting("mapping"), "mapping", group=2)  # of positions, where it is not stingy
    note: str = column(lambda row: row.printed.get("note") or "")
    commit: str = column(provenance("commit"))
    hardware: str = column(provenance("hardware"))
    versions: str = column(provenance("versions"))
    command: str = column(provenance("command"))
    seeds: int = column(lambda row: len(row.records))

    @classmethod
    def of(cls, source: Source) -> "TableRow":
        """The row that records make."""
        return cls(**{key: each.reduce(source) for key, each in COLUMNS.items()})

    @property
    def place(self) -> str:
        """Where the numbers come from."""
        return f"measured at commit {self.commit} on {self.hardware} ({self.versions})"

    @property
    def series(self) -> str:
        """The name that rows of different lengths share: all before the last underscore."""
        return self.name.rpartition("_")[0] or self.name

    def cell(self, key: str) -> str:
        """The text of a column."""
        value, form = getattr(self, key), COLUMNS[key].cell
        if value is None:
            return "-"
        return format(value, form) if isinstance(form, str) else form(value, self)


COLUMNS: dict[str, Column] = {each.name: each.metadata["column"] for each in fields(TableRow)}
