"""Blocks by chance, others for each query: an ablation, to which a scorer that looks at the text is compared."""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.memory.blocks.scorer import BlockScorer, Rotation

DIGITS = 1e3  # of a query's product with a block's numbers those behind the point are a score, here from its third


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, d), numbers that are drawn for each block. seed: of them."""

    seed: int = 0

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        dtype, drawn = torch.promote_types(keys.dtype, torch.float32), []
        for number in range(first, first + keys.shape[1]):
            generator = torch.Generator().manual_seed((self.seed << 32) + number)
            drawn.append(torch.randn(keys.shape[-1], generator=generator))
        found = torch.stack(drawn) if drawn else torch.zeros(0, keys.shape[-1])
        return found.to(keys.device, dtype).repeat(len(keys), 1, 1)

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        products = queries.flatten(1, -2) @ summaries.mT
        return (DIGITS * products).frac().unflatten(1, queries.shape[1:-1])

    def moved(self, summaries: Tensor, rotation: Rotation, distances: Tensor) -> Tensor:
        return summaries
