"""A block is found by its tokens' keys in few numbers, of which the best counts: low-rank keys, as in Loki.

Loki (Singhania et al. 2024, arXiv:2406.02542) projects keys to directions that it learned from other texts. A scorer
sees keys alone, as the model rotates them, so here each block has directions of its own: its singular vectors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.blocks.scorer import BlockScorer


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, rank, d + ℓ): directions, and behind the channels that turn the tokens' numbers along them.
    rank: directions.
    """

    rank: int = 4

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
        tokens, sizes, directions = torch.linalg.svd(exact, full_matrices=False)
        numbers = (tokens * sizes[..., None, :]).mT
        return torch.cat([directions, numbers], -1)[:, :, : self.rank]

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        directions, numbers = summaries.split([dim := queries.shape[-1], summaries.shape[-1] - dim], -1)
        along = queries.flatten(1, -2) @ directions.flatten(1, 2).mT
        along = along.unflatten(-1, directions.shape[1:3]).transpose(1, 2)  # (C, n, …, rank)
        scores = capped(along @ numbers, softcap).amax(-1)
        return scores.transpose(1, 2).unflatten(1, queries.shape[1:-1])
