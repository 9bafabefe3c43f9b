"""Errors of mean losses, and comparisons of two rows on the same text. Loads NumPy when it is first used.

Losses of neighbouring tokens depend on each other. So a text is cut into *units*, its documents or its spans, and a
standard error is taken over those. The same units serve segments of any length. Several seeds have an error of their
own, over the seeds. Whether a difference could be chance is Student's t with n − 1 degrees of freedom, of each error.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Segments = Sequence[Sequence[float]]
"""For each segment: first token counted, tokens counted, their summed loss in nats."""

LEAST = 8  # units of a text below which it has no error
CHANCE = 0.05  # a difference that is less probable by chance is shown


@dataclass(frozen=True)
class Text:
    """What the units of a text can be. span: tokens of a span. documents: the first token of each document of which a
    token counts, ascending; None: not known. A span is of the document in which it begins.
    """

    span: int = 4096
    documents: Sequence[int] | None = None

    def units(self, starts: Sequence[float]) -> tuple[str, Sequence[float]]:
        """Documents or spans, the larger ones of which there are at least `LEAST`; and the unit of each stretch of text
        that starts at these tokens, ascending.
        """
        spans = self._spans(starts)
        found = [("spans", spans)]
        if self.documents is not None:
            found.append(("documents", [bisect_right(self.documents, span) for span in spans]))
        enough = [each for each in found if len(set(each[1])) >= LEAST]
        return min(enough or found, key=lambda each: len(set(each[1])) * (1 if enough else -1))

    def _spans(self, starts: Sequence[float]) -> list[float]:
        """For each stretch the first token of its span."""
        found, begin = [], -math.inf
        for start in starts:
            begin = start if start >= begin + self.span else begin
            found.append(begin)
        return found


@dataclass(frozen=True)
class Error:
    """A standard error over `count` seeds, documents or spans. value: None where there are too few."""

    value: float | None
    count: int
    unit: str

    @property
    def over(self) -> str:
        """What it is over, as "61 spans of 4,096 tokens"."""
        return f"{self.count} {self.unit}"

    def chance(self, difference: float) -> float | None:
        """How probable such a difference from 0, or a larger one, is by chance; None without a value."""
        if self.value is None:
            return None
        return student(abs(difference) / self.value if self.value else math.inf, self.count - 1)


@dataclass(frozen=True)
class Mean:
    """A mean loss, or the difference of two, nats a token. seeds: its error over several seeds, of one None. text: its
    error over units of the text.
    """

    nats: float
    seeds: Error | None
    text: Error

    @property
    def error(self) -> float | None:
        """The standard error that is printed: over seeds, of one over the text."""
        return (self.seeds or self.text).value

    @property
    def errors(self) -> list[Error]:
        """Those that there are, the one that is printed first."""
        return [error for error in (self.seeds, self.text) if error is not None and error.value is not None]

    @property
    def chance(self) -> float | None:
        """How probable the difference is by chance: the larger probability of both errors. None without any."""
        return max((chance for error in self.errors if (chance := error.chance(self.nats)) is not None), default=None)


def mean_loss(row: Sequence[Segments], text: Text | None = None) -> Mean:
    """The mean loss of a row. row: its segments, for each seed."""
    import numpy as np

    tables = [np.asarray(segments, dtype=np.float64) for segments in row]
    return _mean(tables[0][:, 0], tables[0][:, 1], [table[:, 2] for table in tables], text or Text())


def paired_difference(row: Sequence[Segments], other: Sequence[Segments], text: Text | None = None) -> Mean | None:
    """How much a row's loss is above another's, paired on the same text, seed by seed; None where they read other text.
    A row of one seed is paired with each of the other's. Raises ValueError for other numbers of seeds.
    """
    import numpy as np

    seeds = max(len(row), len(other))
    row, other = (each * seeds if len(each) == 1 else each for each in (list(row), list(other)))
    ends = [_ends(segments) for segments in [*row, *other]]
    covered = [(starts - stops, stops - starts) for starts, stops in ends]  # segments that touch cover one range
    if any(each != covered[0] for each in covered):
        return None
    edges = sorted(set.intersection(*(starts | stops for starts, stops in ends)))
    summed = [(_summed(a, edges), _summed(b, edges)) for a, b in zip(row, other, strict=True)]
    tokens = summed[0][0][0]
    counted = tokens > 0
    differences = [(a - b)[counted] for (_, a), (_, b) in summed]
    return _mean(np.asarray(edges)[counted], tokens[counted], differences, text or Text())


def _mean(starts: Any, tokens: Any, nats: Sequence[Any], text: Text) -> Mean:
    """The mean of stretches of text, arrays (N,). nats: summed, for each seed."""
    import numpy as np

    means = [float(each.sum() / tokens.sum()) for each in nats]
    order = np.argsort(starts, kind="stable")
    unit, numbers = text.units(starts[order].tolist())
    _, units = np.unique(numbers, return_inverse=True)
    size = np.bincount(units, tokens[order])
    residual = np.bincount(units, np.mean(nats, 0)[order]) - statistics.fmean(means) * size
    n, even = len(size), f" of {int(size[0]):,} tokens" if unit == "spans" and len(set(size.tolist())) == 1 else ""
    error = math.sqrt(n / (n - 1) * (residual**2).sum()) / size.sum() if n >= LEAST else None  # of a ratio of sums
    return Mean(statistics.fmean(means), over_seeds(means), Error(error and float(error), n, unit + even))


def over_seeds(values: Sequence[float]) -> Error | None:
    """The standard error of the mean of values, one for each seed; None for one."""
    n = len(values)
    return Error(statistics.stdev(values) / math.sqrt(n), n, "seeds") if n > 1 else None


def _ends(segments: Segments) -> tuple[set[int], set[int]]:
    """The tokens at which segments start, and those before which they stop."""
    return {int(start) for start, *_ in segments}, {int(start + tokens) for start, tokens, *_ in segments}


def _summed(segments: Segments, edges: list[int]) -> tuple[Any, Any]:
    """Tokens and loss between edges, arrays by the edge that they follow."""
    import numpy as np

    table = np.asarray(segments, dtype=np.float64)
    bins = np.searchsorted(edges, table[:, 0], side="right") - 1
    tokens, nats = (np.bincount(bins, table[:, part], minlength=len(edges)) for part in (1, 2))
    return tokens, nats


def student(t: float, degrees: int) -> float:
    """How probable a value of at least t > 0 either way is for Student's t (Abramowitz & Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    term = total = math.cos(angle) if degrees % 2 else 1.0
    for n in range(2 + degrees % 2, degrees - 1, 2):
        term *= (n - 1) / n * math.cos(angle) ** 2
        total += term
    if degrees % 2:
        inside = 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))
    else:
        inside = math.sin(angle) * total
    return max(0.0, 1 - inside)


def score_interval(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Bounds of the 95 % interval of a mean of scores 0…1: Clopper–Pearson's, a prompt as one trial, or wider; of
    several seeds that of all their prompts together, and Student's over the seeds where it is wider.
    """
    pooled = [score for seed in scores for score in seed]
    total, n = round(sum(pooled), 9), len(pooled)
    low, high = clopper_pearson(math.floor(total), n)[0], clopper_pearson(math.ceil(total), n)[1]
    if (error := over_seeds([statistics.fmean(seed) for seed in scores])) is None or not error.value:
        return low, high
    reach, mean = error.value * _within(error.count - 1), total / n
    return max(0.0, min(low, mean - reach)), min(1.0, max(high, mean + reach))


def _within(degrees: int) -> float:
    """The t that is passed with a probability of `CHANCE`."""
    return bisect_left(range(10**6), True, key=lambda n: student(n / 1000, degrees) <= CHANCE) / 1000


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """Lower and upper bound of the exact (Clopper–Pearson) 95 % confidence interval of a proportion."""

    def at_most(count: int, p: float) -> float:
        return sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(count + 1))

    def solve(count: int, chance: float) -> float:
        """The largest p, of multiples of 2⁻⁶⁰, at which `at_most` is more than `chance`."""
        return (bisect_left(range(2**60), True, key=lambda n: at_most(count, n / 2**60) <= chance) - 1) / 2**60

    tail = (1 - 0.95) / 2
    return (
        0.0 if successes == 0 else solve(successes - 1, 1 - tail),
        1.0 if successes == trials else solve(successes, tail),
    )
