"""Blocks that are not retrieved, read in short: each as one token, with its landmark's value.

The outer softmax is then over local attention and all blocks that are kept. The gate of a retrieved block is spread
over its tokens, as always; that of any other block is the weight of its landmark's own value
(`landmark.attention.top_k` does the same in training). Those landmarks are at the positions at which they are scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.memory.block_attention import weighted_sum
from landmark.memory.block_store import BlockStore
from landmark.memory.query_tiles import for_each_head
from landmark.memory.retrieval import scores_of_all


def merge_with_landmarks(
    local: tuple[Tensor, Tensor],
    block_out: Tensor,
    gates: Tensor,
    rotated_queries: Tensor,
    store: BlockStore,
    ages: Tensor,
    num_recent: int,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """`landmark.memory.block_attention.merge`, with the landmarks of the blocks that are not retrieved.

    Args:
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention.
        block_out: (B, H, T, q, d), of the retrieved blocks.
        gates: (B, H, T, q), theirs.
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        store: the layer's blocks, with their landmarks' values.
        ages: (B, H, H_kv or 1, T or 1, q), of the retrieved blocks; 1 is the newest block.
        num_recent, softcap: as in `landmark.memory.retrieval.retrieve`.

    Returns the output (B, H, T, d) and the weights of the retrieved blocks (B, H, T, q).
    """
    out, lse = local
    heads, count = out.shape[1], len(store)
    rows = for_each_head(store.rows(ages), heads).expand(*gates.shape)
    others = scores_of_all(rotated_queries, store, num_recent, softcap).scatter(-1, rows, -torch.inf)
    weights = torch.cat([lse[..., None], gates.to(lse.dtype), others.to(lse.dtype)], -1).softmax(-1).to(out.dtype)
    of_local, of_blocks, of_landmarks = weights.split([1, gates.shape[-1], count], -1)
    values = store.landmark_values[:, :, :count].to(out.dtype).repeat_interleave(heads // store.kv_heads, 1)
    return of_local * out + weighted_sum(of_blocks, block_out) + of_landmarks @ values, of_blocks
