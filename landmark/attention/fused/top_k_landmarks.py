"""The k best landmarks of each query by two Triton kernels, without a tensor of all scores.

A program scores a tile of landmarks and keeps the k best of them, as integers whose order is that of the pairs of score
and recency: among equal scores the newer block is better. A second kernel takes the k best of these, which are a small
part of all landmarks.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded

TILE = 64  # landmarks of a program
MOST = 16  # blocks that a tile of landmarks can keep; of more, most of a tile would be kept
YOUNGEST = (1 << 31) - 1  # recency of a block of age 0


def top_k_landmarks(
    rotated_queries: Tensor, landmarks: Tensor, *, added: int | Tensor, recent: int, k: int, tied: bool = False
) -> Tensor:
    """The ages of the best blocks of each query and head.

    Args:
        rotated_queries: (S, B, T, H, d), float32, scaled, and rotated for lag 1…S.
        landmarks: (B, H_kv, capacity, d), float32; block number n, counted from the first one ever added, is in row
            n mod capacity.
        added: blocks ever added; a tensor (), int64, is read by the kernel alone, which may be in a CUDA graph.
        recent: number of newest blocks that are scored at a lag that is their age; all older ones at lag S.
        k: blocks to choose, at most MOST and the number of rows in use, min(added, capacity).
        tied: whether all older blocks have one and the same score; then recent + k is at most TILE.

    Returns (B, H, T, k), int64, oldest first; age 1 is the newest block.
    """
    from landmark.attention.fused.top_k_landmarks_kernel import best_of_tiles
    from landmark.attention.fused.top_k_landmarks_kernel import top_k_landmarks as kernel

    _, batch, queries, heads, dim = rotated_queries.shape
    kv_heads, capacity = landmarks.shape[1:3]
    blocks = capacity if isinstance(added, Tensor) else min(added, capacity)
    rows = queries * (heads // kv_heads)
    tiles, options = 1 if tied else -(-blocks // TILE), constants(rows, dim, k)
    best = rotated_queries.new_empty(batch, heads, queries, tiles * k, dtype=torch.int64)
    ages = best.new_empty(batch, heads, queries, k)
    number, counter = (0, added) if isinstance(added, Tensor) else (added, best)
    with on_device_of(rotated_queries):
        kernel[(tiles, -(-rows // options["M"]), batch * kv_heads)](
            *(rotated_queries, rotated_queries[-1], landmarks, best, counter),
            *(*rotated_queries.stride(), *landmarks.stride()),
            *(queries, heads, kv_heads, number, capacity, recent),
            TIED=tied,
            COUNTED=isinstance(added, Tensor),
            **options,
        )
        best_of_tiles[(batch * heads * queries,)](best, ages, tiles * k, **merge_constants(k))
    return ages


def merge_constants(k: int) -> dict[str, Any]:
    """Compile-time constants of the kernel that merges. k: blocks to choose."""
    return {"K": k, "BLOCK_K": padded(k), "BLOCK": 1024, "num_warps": 4, "num_stages": 1}


def constants(rows: int, dim: int, k: int) -> dict[str, Any]:
    """Compile-time constants of the kernel.

    Args:
        rows: queries times the heads that share a key/value head.
        dim: d, numbers of a head.
        k: blocks to choose.
    """
    return {
        "K": k,
        "D": dim,
        "BLOCK_D": padded(dim),
        "M": 1 if rows == 1 else 16,
        "N": TILE,
        "num_warps": 4 if dim <= 64 else 8,
        "num_stages": 1,
    }
