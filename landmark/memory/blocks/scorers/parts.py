"""A block is found by the means of its parts, of a few tokens each: the best of them counts.

So what is scored is finer than what is read, as in the hierarchical paging of LServe (Yang et al. 2025,
arXiv:2502.14866, Section 3.5).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.memory.blocks.scorer import KEY, BlockScorer
from landmark.memory.blocks.scorers.exact import scores_of_keys
from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Summaries are (C, n, ⌈ℓ/tokens⌉, d). tokens: of a part."""

    tokens: int = 8

    def check_model(self, digest: Callable[[], str | None], block_size: int) -> None:
        if self.tokens < 1 or block_size % self.tokens:
            raise UserError(f"{KEY}=parts: tokens={self.tokens} must divide model.block_size={block_size}")

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        dtype = torch.promote_types(keys.dtype, torch.float32)
        return keys.unflatten(2, (-1, self.tokens)).mean(3, dtype=dtype)

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        return scores_of_keys(queries, summaries, softcap).amax(-1)
