"""A block is found by its smallest and its largest keys: Quest (Tang et al. 2024, arXiv:2406.10774, Algorithm 1).

In each channel the larger of the query's products with the two counts. Their sum is a bound that no key of the block
scores above.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.blocks.scorer import BlockScorer, Rotation
from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, 2, d): the smallest and the largest number of each channel."""

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        bounds = torch.stack(keys.aminmax(dim=2), 2)
        return bounds.to(torch.promote_types(keys.dtype, torch.float32))

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        rows = queries.flatten(1, -2)
        bounds = rows.clamp(max=0) @ summaries[:, :, 0].mT + rows.clamp(min=0) @ summaries[:, :, 1].mT
        return capped(bounds, softcap).unflatten(1, queries.shape[1:-1])

    def moved(self, summaries: Tensor, rotation: Rotation, distances: Tensor) -> Tensor:
        raise UserError("retrieval.scorer=quest: bounds of keys do not turn as keys do, set positions.mapping=true")
