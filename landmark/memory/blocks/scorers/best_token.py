"""A block is found by its best token: the highest score of all its keys. A ceiling, which reads them all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.memory.blocks.scorer import BlockScorer
from landmark.memory.blocks.scorers.exact import scores_of_keys


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are the keys (C, n, ℓ, d)."""

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        return keys.to(torch.promote_types(keys.dtype, torch.float32))

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        return scores_of_keys(queries, summaries, softcap).amax(-1)
