"""Scores of whole blocks by one Triton kernel, which reads their keys where they are stored.

The score of a block is that of its landmark plus the log-sum-exp of those of its tokens, by which a second look chooses
(`landmark.memory.select.second_look`). A block is read once for all heads that choose together.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import is_interpreted, of_whole_blocks, on_device_of, padded


def score_blocks(
    rotated_queries: Tensor,
    keys: Tensor,
    landmarks: Tensor,
    ages: Tensor,
    lags: Tensor,
    *,
    added: int,
) -> Tensor:
    """Scores of blocks, for each query those named for it.

    Args:
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        keys: (B·H_kv·capacity, ℓ, d), of all blocks, in the rows of their landmarks.
        landmarks: (B, H_kv, capacity, d), keys of landmarks; block number n, counted from the first one ever added, is
            in row n mod capacity.
        ages: (B, H or H_kv, T, m), integer, the blocks of each query; 1 is the newest block.
        lags: the shape of ages, the lag of each block.
        added: blocks ever added.

    Returns (B, H, T, m), float32.
    """
    from landmark.attention.fused.block_scores_kernel import block_scores

    if is_interpreted() and rotated_queries.dtype == torch.bfloat16:  # the interpreter does not support it
        rotated_queries, keys = rotated_queries.float(), keys.float()
    slots, batch, queries, heads, dim = rotated_queries.shape
    sets, count = ages.shape[1], ages.shape[-1]
    rows_of_landmarks = landmarks.flatten(0, 2)
    out = rotated_queries.new_empty(batch, heads, queries, count, dtype=torch.float32)
    with on_device_of(rotated_queries):
        block_scores[(queries, sets, batch)](
            *(rotated_queries, keys, rows_of_landmarks, ages, lags, out),
            *(*rotated_queries.stride(), *keys.stride(), *rows_of_landmarks.stride(), *ages.stride(), *lags.stride()),
            *(landmarks.shape[1], count, added, landmarks.shape[2]),
            ONE_LAG=slots == 1,
            **constants(keys.shape[1], dim, rotated_queries.dtype, heads // sets),
        )
    return out


def constants(block_size: int, dim: int, dtype: torch.dtype, group: int) -> dict[str, Any]:
    """Compile-time constants of the kernel.

    Args:
        block_size: ℓ, normal tokens of a block.
        dim: d, numbers of a head.
        dtype: type of queries and keys.
        group: heads that choose together.
    """
    fixed, load = of_whole_blocks(block_size, dim, dtype)
    return fixed | {"HEADS": group, "M": padded(group), "num_warps": 8 if load > 1 else 4}
