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
    scores = proposed.empty(dtype=proposed.store.landmarks.dtype)
    for part in proposed.parts():
        scores[part.tiles] = proposed.split(proposed.gates(part, 1.0))  # whatever joint_softmax is: the best matches
    scores = proposed.of_queries(scores)[..., 0]
    if always is not None:
        scores = scores.masked_fill(always, math.inf)
    newest_first = (scores if shift is None else scores + shift).flip(-1)  # a stable sort then decides ties
    chosen = newest_first.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return (scores.shape[-1] - 1 - chosen).sort(-1).values
