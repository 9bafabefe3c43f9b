"""A second look at the best blocks: of those with the best landmarks, the ones with the best landmark and tokens.

A landmark's key says of a block what fits into d numbers; what a query finds in it, the keys of its tokens say. So
landmarks propose m blocks, and of these a query retrieves the k with the largest

    s_b + log Σ_j exp s_j,        s_b the score of block b's landmark, s_j of its tokens j,

the weight that the block would have if the landmark were a bias of its tokens' scores. It scores m·ℓ keys for that,
whatever the length of the text.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from landmark.memory.query_tiles import QueryTiles
from landmark.memory.query_window import best_of_window
from landmark.memory.retrieval import best_ages, scored_at_once


@torch.no_grad()
def rerank(proposed: QueryTiles, k: int, shift: Tensor | None, always: Tensor | None = None) -> Tensor:
    """Choose k of the proposed blocks for each query.

    Args:
        proposed: queries and the m blocks that landmarks propose to each, oldest first, at the lags of scoring.
        k: blocks to choose.
        shift: what is added to the landmarks' scores, (B, H, n, m); None: nothing.
        always: (B, H, n, m), bool, blocks that are chosen whatever they score, at most k; None: none.

    Returns the places of the chosen blocks among the m, ascending, (B, H, n, k). Among equal scores the newer blocks
    are chosen.
    """
    scores = _scores(proposed)
    if always is not None:
        scores = scores.masked_fill(always, math.inf)
    newest_first = (scores if shift is None else scores + shift).flip(-1)  # a stable sort then decides ties
    chosen = newest_first.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return (scores.shape[-1] - 1 - chosen).sort(-1).values


@torch.no_grad()
def rerank_together(proposed: QueryTiles, ages: Tensor, k: int, window: int, before: int, kept: int = 0) -> Tensor:
    """Choose k of the blocks proposed to each query or to those before it (query_window.py).

    Each query looks at its own proposals, and its scores are logs of shares of these.

    Args:
        proposed: queries, the first `before` of them of tokens before the chunk, and the m blocks proposed to each.
        ages: of these blocks, (B, H, before + T, m).
        k: blocks to choose, fewer than m.
        window, before: as in `best_of_window`.
        kept: newest blocks that are chosen whatever they score.

    Returns the ages of the chosen blocks, oldest first, (B, H, T, k).
    """
    store, scores = proposed.store, _scores(proposed)
    scores = scores - scores.logsumexp(-1, keepdim=True)
    rows, every = store.rows(ages), store.ages()
    queries, chosen = ages.shape[2] - before, []
    step = max(1, scored_at_once(ages.device) // (ages[:, :, 0, 0].numel() * len(store)))
    for start in range(0, queries, step):
        first, stop = max(0, before + start - window + 1), before + min(start + step, queries)
        of_blocks = scores.new_full((*ages.shape[:2], stop - first, len(store)), -math.inf)
        of_blocks.scatter_(-1, rows[:, :, first:stop], scores[:, :, first:stop])
        best = best_of_window(of_blocks, window, before + start - first)
        best[..., every <= kept] = math.inf
        chosen.append(best_ages(best, every, k))
    return torch.cat(chosen, 2).sort(-1, descending=True).values


def _scores(proposed: QueryTiles) -> Tensor:
    """s_b + log Σ_j exp s_j of each query and block proposed to it, (B, H, n, m)."""
    scores = proposed.empty(dtype=proposed.store.landmarks.dtype)
    for part in proposed.parts():
        scores[part.tiles] = proposed.split(proposed.gates(part, 1.0))  # whatever joint_softmax is: the best matches
    return proposed.of_queries(scores)[..., 0]
