"""Landmarks that a pretrained model learns while its own weights stay: what a block's keys are to queries from afar.

There is no landmark token in the text. Beside the mean of the block's keys, which needs no training, a landmark has
what learned queries find in its block, as the hidden state of a landmark token would:

    k_lm = k̄ + A₀ k̄ + Σ_r A_r Σ_j softmax_j(u_r·k_j) k_j + c,

with u, A and c learned for each layer and head of keys, and a query u_r for each of the model's heads that share these
keys. A and c begin at 0, and so the landmark as the mean; a query begins as the mean of its head's own. They learn to
give blocks the weights that the model's own attention gives them (landmark/huggingface/learning.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedLandmarks(nn.Module):
    """The landmarks of one layer."""

    def __init__(self, heads: int, kv_heads: int, dim: int):
        """heads: H. kv_heads: H_kv. dim: d."""
        super().__init__()
        queries = heads // kv_heads  # R
        self.queries = nn.Parameter(torch.zeros(kv_heads, queries, dim))
        self.maps = nn.Parameter(torch.zeros(kv_heads, queries + 1, dim, dim))
        self.constant = nn.Parameter(torch.zeros(kv_heads, dim))

    def forward(self, keys: Tensor) -> Tensor:
        """The landmarks' keys (B, H_kv, n, d), of a block's first place.

        keys: (B, H_kv, n, ℓ, d), rotated by their offsets 0…ℓ−1 in the block.
        """
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        queries, maps, constant = (x.to(keys) for x in (self.queries, self.maps, self.constant))
        mean = keys.mean(-2)
        weights = (keys @ queries[:, None].mT).softmax(-2)  # (B, H_kv, n, ℓ, R)
        found = torch.cat([mean[..., None, :], weights.mT @ keys], -2)  # (B, H_kv, n, 1 + R, d)
        return mean + torch.einsum("bhnrd,hred->bhne", found, maps) + constant[:, None]
