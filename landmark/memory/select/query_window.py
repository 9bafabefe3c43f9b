"""A window of queries: a token's blocks are the best ones for it or for one of the tokens before it.

One query can miss a block that the query of the token before had found: every digit of a number that is copied searches
anew. With a window of w queries, those of a token and of the w − 1 places before it, landmarks included, block b has
the score

    max over the queries j of the window of (s_jb − log Σ_b' exp s_jb'),

the log of the largest share that one of them would give it (as in step 2 of scores.py), and the token reads the k
blocks with the largest. Its attention to them is its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from landmark.memory.question import Question
from landmark.memory.select.selector import Around, Choice, Selector


@dataclass(frozen=True)
class QueryWindow(Around):
    """Lets `window` queries, at most ℓ, choose together; inner: ranks blocks by scores."""

    window: int
    inner: Selector

    @property
    def earlier_queries(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.window - 1

    def choose(self, question: Question) -> Choice:
        wider = question.with_earlier_queries(self.window)
        return replace(self.inner.choose(wider), question=wider)


def best_of_window(scores: Tensor, window: int, before: int) -> Tensor:
    """The largest score of each query and those before it: (…, before + T, n) → (…, T, n).

    Args:
        scores: of one block in the last dimension for each query, in order.
        window: w, queries that choose together, the own one included.
        before: queries at the start that choose nothing themselves.
    """
    best = scores[..., before:, :].clone()
    for back in range(1, min(window, scores.shape[-2])):
        first = max(0, back - before)  # the first query that has one so far back
        rows = slice(before + first - back, scores.shape[-2] - back)
        torch.maximum(best[..., first:, :], scores[..., rows, :], out=best[..., first:, :])
    return best
