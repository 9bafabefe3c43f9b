"""Errors of perplexities, and paired comparisons of two rows on the same text. Loads NumPy when it is first used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    if _runs(a) != _runs(b):
        return None
    edges = sorted(_edges(a) & _edges(b))
    sums_a, sums_b = _summed(a, edges), _summed(b, edges)
    if len(sums_a) < 2:
        return None
    rows = [(start, tokens, nll - sums_b[start][1]) for start, (tokens, nll) in sums_a.items()]
    return Difference(*mean_and_error(rows), len(rows))


def _edges(segments: Segments) -> set[int]:
    return {int(start) for start, *_ in segments} | {int(start + tokens) for start, tokens, *_ in segments}


def _runs(segments: Segments) -> list[tuple[int, int]]:
    """The token ranges that the segments cover, joined where they touch."""
    joined: list[tuple[int, int]] = []
    for start, tokens, *_ in sorted((int(s[0]), int(s[1])) for s in segments):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], start + tokens
        else:
            joined.append((start, start + tokens))
    return joined


def _summed(segments: Segments, edges: list[int]) -> dict[int, tuple[float, float]]:
    """Tokens and loss between edges, keyed by the edge they follow."""
    import numpy as np

    bins = np.searchsorted(edges, [s[0] for s in segments], side="right") - 1
    sums: dict[int, tuple[float, float]] = {}
    for where, (_, tokens, nll) in zip(bins, segments, strict=True):
        key = edges[int(where)]
        have = sums.get(key, (0.0, 0.0))
        sums[key] = have[0] + tokens, have[1] + nll
    return sums


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """Lower and upper bound of the exact (Clopper–Pearson) 95 % confidence interval of a proportion."""

    def at_most(count: int, p: float) -> float:
        return sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(count + 1))

    def solve(count: int, chance: float) -> float:
        """The p at which `at_most` falls to `chance`."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(count, middle) > chance else (low, middle)
        return low

    tail = (1 - 0.95) / 2
    return (
        0.0 if successes == 0 else solve(successes - 1, 1 - tail),
        1.0 if successes == trials else solve(successes, tail),
    )
