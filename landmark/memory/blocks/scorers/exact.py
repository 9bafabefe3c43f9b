"""A block is found by its exact share: the log-sum-exp of the scores of all its keys. A ceiling, which reads them all.

No summary can rank blocks by their attention better. Whether these blocks are the best to read is another question.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.blocks.scorer import BlockScorer


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are the keys (C, n, ℓ, d)."""

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        return keys.to(torch.promote_types(keys.dtype, torch.float32))

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        return scores_of_keys(queries, summaries, softcap).logsumexp(-1)


def scores_of_keys(queries: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """Scores (C, …, n, r) of queries (C, …, d) and of keys (C, n, r, d)."""
    products = queries.flatten(1, -2) @ keys.flatten(1, 2).mT
    return capped(products, softcap).view(*queries.shape[:-1], *keys.shape[1:3])
