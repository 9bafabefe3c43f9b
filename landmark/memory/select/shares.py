"""Queries that choose blocks together, each with its share for every block (query_window.py)."""

from __future__ import annotations

import torch
from torch import Tensor


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
