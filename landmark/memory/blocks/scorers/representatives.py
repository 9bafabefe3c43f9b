"""A block is found by a few of its own keys: the representative tokens of InfLLM (Xiao et al. 2024, arXiv:2402.04617).

InfLLM takes those to which the tokens after them attend most, and sums their scores. A memory is saved and loaded as
keys and values alone, so queries are not known here. The keys furthest from the block's mean are taken, which the mean
says least about.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.memory.blocks.scorer import BlockScorer
from landmark.memory.blocks.scorers.exact import scores_of_keys


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, tokens, d). tokens: that stand for a block; InfLLM has 4."""

    tokens: int = 4

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        distances = (keys - keys.mean(2, keepdim=True)).square().sum(-1)
        places = distances.topk(min(self.tokens, keys.shape[2])).indices
        return keys.gather(2, places[..., None].expand(-1, -1, -1, keys.shape[-1]))

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        return scores_of_keys(queries, summaries, softcap).logsumexp(-1)
