"""The last blocks, whatever is in them: an ablation, to which a scorer that looks at the text is compared."""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.memory.blocks.scorer import BlockScorer, Rotation

STEP = 0.01  # between blocks, so that float32 still tells shares of thousands of them apart


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, 1), numbers of blocks."""

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        dtype = torch.promote_types(keys.dtype, torch.float32)
        numbers = torch.arange(first, first + keys.shape[1], dtype=dtype, device=keys.device)
        return numbers[:, None].repeat(len(keys), 1, 1)

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        shape = len(queries), *[1] * (queries.ndim - 2), summaries.shape[1]
        return (STEP * summaries).view(shape).expand(*queries.shape[:-1], -1)

    def moved(self, summaries: Tensor, rotation: Rotation, distances: Tensor) -> Tensor:
        return summaries
