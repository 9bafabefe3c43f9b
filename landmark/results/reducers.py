"""The value of a table's column, made from the records of a row: one record per seed."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from landmark.utils.significance import Difference

Record = dict[str, Any]
Numbers = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Source:
    """The values that a row is made of.

    records: one per seed. printed: the paper's row with these settings, or nothing. against: the row with which this
    one is compared. difference: from that row, paired on the same text; None where the texts differ.
    """

    name: str
    records: Sequence[Record]
    printed: dict[str, str]
    against: str
    difference: Difference | None

    def results(self, *keys: str) -> list[Any]:
        """A result of every seed, which these keys lead to; None where it is missing."""
        found: list[Any] = [record["results"] for record in self.records]
        for key in keys:
            found = [None if each is None else each.get(key) for each in found]
        return found

    def fold(self, reduce: Numbers, *keys: str) -> float | None:
        """A result of all seeds as one number; None where a seed lacks it."""
        found = self.results(*keys)
        return None if any(value is None for value in found) else reduce(found)


Reducer = Callable[[Source], Any]


def setting(key: str) -> Reducer:
    """A setting, the same for all seeds."""
    return lambda source: source.records[0]["settings"].get(key)


def mean(*keys: str) -> Reducer:
    """The mean of a result over seeds."""
    return lambda source: source.fold(statistics.fmean, *keys)


def printed(key: str, kind: type) -> Reducer:
    """A number of the paper's."""
    return lambda source: kind(text) if (text := source.printed.get(key)) else None


def provenance(key: str) -> Reducer:
    """Where the first seed's record was made."""
    return lambda source: provenance_of(source.records[0])[key]


def provenance_of(record: Record) -> dict[str, str]:
    """Commit, hardware, versions and command of a record, as texts."""
    made = record["provenance"]
    hardware, versions = made["hardware"], made["versions"]
    cores = f"{hardware['cores']} core{'' if hardware['cores'] == 1 else 's'}"
    return {
        "commit": (made["commit"] or "unknown")[:10],
        "hardware": ", ".join([*hardware.get("gpus", []), f"{hardware['cpu']}, {cores}"]),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch") if versions.get(name)),
        "command": whole_command(made["command"]),
    }


def spread(key: str) -> Reducer:
    """Standard error of a result over segments (one seed), or its standard deviation over seeds."""

    def reduce(source: Source) -> float | None:
        if len(source.records) == 1:
            return source.results(f"{key}_se")[0]
        return source.fold(statistics.stdev, key)

    return reduce


def share_bound(share: str, bound: str, sign: int) -> Reducer:
    """A bound of a share as the record of one seed has it; of several the mean and a standard deviation either way."""

    def reduce(source: Source) -> float | None:
        mean = source.fold(statistics.fmean, share)
        if mean is None or len(source.records) == 1:
            return source.fold(statistics.fmean, bound)
        return min(1.0, max(0.0, mean + sign * statistics.stdev(source.results(share))))

    return reduce


def recall_interval(key: str) -> Reducer:
    """As the record of one seed has it."""

    def reduce(source: Source) -> tuple[float, float] | None:
        interval = source.results(f"{key}_interval")[0]
        return None if interval is None or len(source.records) > 1 else (interval[0], interval[1])

    return reduce


def median_rank(source: Source) -> float | None:
    """Of the texts of all seeds."""
    ranks = [rank for seed in source.results("ranks") for rank in seed or []]
    return statistics.median(ranks) if ranks else None


def off_device(reduce: Reducer) -> Reducer:
    """Only of rows whose blocks were kept on another tier than the device."""
    return lambda source: None if None in source.results("memory", "cache_hits") else reduce(source)


def searching(source: Source) -> float:
    """Share of the time that the search for blocks took."""
    shares = zip(source.results("memory", "seconds_searching"), source.results("seconds"), strict=True)
    return statistics.fmean(searching / seconds for searching, seconds in shares)


def cutoff(source: Source) -> str | None:
    """One for all layers, or a list."""
    found = source.records[0]["settings"].get("cmt_cutoff")
    return None if found is None else str(found)


def drop_rate_spread(source: Source) -> float | None:
    """Standard deviation over seeds."""
    return source.fold(statistics.stdev, "memory", "drop_rate") if len(source.records) > 1 else None


def whole_command(words: str) -> str:
    """A command as it is typed; records of early versions leave out `python`."""
    return f"python {words}" if words.startswith("run.py") else words
