"""Errors of perplexities, and paired comparisons of two rows on the same text. Loads NumPy when it is first used."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Segments = Sequence[Sequence[float]]
"""For each segment: first token counted, tokens counted, their summed loss in nats."""


def mean_and_error(segments: Segments) -> tuple[float, float]:
    """Mean loss per token, and its standard error over segments, in nats: that of a ratio of sums, NaN for one."""
    import numpy as np

    table = np.asarray(segments, dtype=np.float64)
    tokens, nll = table[:, 1], table[:, 2]
    mean = nll.sum() / tokens.sum()
    n = len(table)
    if n < 2:
        return float(mean), math.nan
    residual = nll - mean * tokens
    return float(mean), float(math.sqrt(n / (n - 1) * (residual**2).sum()) / tokens.sum())


@dataclass(frozen=True)
class Difference:
    """Difference a − b of two mean losses on `stretches` of the same text, nats a token, and its standard error."""

    nats: float
    error: float
    stretches: int


def paired_difference(a: Segments, b: Segments) -> Difference | None:
    """Compare two rows over the stretches into which both cut the text; None for other tokens, or for one stretch."""
    import numpy as np

    (starts, stops), (other_starts, other_stops) = _ends(a), _ends(b)
    if not starts or (starts - stops, stops - starts) != (other_starts - other_stops, other_stops - other_starts):
        return None  # segments that touch cover one range
    edges = sorted((starts | stops) & (other_starts | other_stops))
    (tokens, nats), (_, others) = _summed(a, edges), _summed(b, edges)
    rows = np.stack([edges, tokens, nats - others], 1)[tokens > 0]
    return None if len(rows) < 2 else Difference(*mean_and_error(rows.tolist()), len(rows))


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
