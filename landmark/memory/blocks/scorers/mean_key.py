"""A block is found by the mean of its keys, as in MoBA and InfLLM. The default, and the one with kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.blocks.scorer import BlockScorer, Rotation


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, d)."""

    has_kernels = True

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        return keys.mean(2, dtype=torch.promote_types(keys.dtype, torch.float32))

    def write(self, out: Tensor, keys: Tensor, values: Tensor, first: int) -> None:
        torch.mean(keys, 2, dtype=out.dtype, out=out)  # one launch

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        return capped(queries.flatten(1, -2) @ summaries.mT, softcap).unflatten(1, queries.shape[1:-1])

    def moved(self, summaries: Tensor, rotation: Rotation, distances: Tensor) -> Tensor:
        return rotation(summaries[:, :, None], distances)[:, :, 0]
