"""Attention of the next tokens to the pending tokens of their block by one Triton kernel, of shapes that do not change.

It does what is done before blocks are chosen: writes the new keys and values, rotates keys and queries, attends, and
rotates the queries for each lag. The number of pending tokens is read by the kernel alone.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any, NamedTuple

import torch
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded


class OfPending(NamedTuple):
    """What the queries of new tokens find in their block, and what they ask the blocks before it.

    out: (B, H, T, d), of local attention. lse: (B, H, T), float32, its log-sum-exp. exact, rounded: (S, B, T, H, d),
    the queries, scaled, and rotated for lag 1…S, in float32 and in their type.
    """

    out: Tensor
    lse: Tensor
    exact: Tensor
    rounded: Tensor


def attend_to_pending_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    pending: Tensor,
    factors: Tensor,
    scale: float,
    lags: int,
) -> OfPending:
    """Attention of T new tokens to those of the last block, which they may complete but not exceed.

    Args:
        q: (B, H, T, d), not rotated.
        k, v: (B, H_kv, T, d), k not rotated.
        keys, values: (B, H_kv, W, d), of the block's tokens, keys not rotated; the new ones are written to them.
        pending: (), int64, tokens of the block before the new ones.
        factors: ((S + 1) W, d/2, 2), float32, cosines and sines of positions 0, 1, 2, ….
        scale: factor of the scores.
        lags: S; lag s is s · W positions further.
    """
    from landmark.attention.fused.pending_tokens_kernel import pending_tokens as kernel

    batch, heads, queries, dim = q.shape
    out, lse = q.new_empty(batch, heads, queries, dim), q.new_empty(batch, heads, queries, dtype=torch.float32)
    exact = q.new_empty(lags, batch, queries, heads, dim, dtype=torch.float32)
    rounded = exact if q.dtype == torch.float32 else exact.new_empty(exact.shape, dtype=q.dtype)
    with on_device_of(q):
        kernel[(queries, heads, batch)](
            *(q, k, v, keys, values, pending, factors, out, lse, exact, rounded),
            *(*q.stride(), *k.stride(), *v.stride(), heads, k.shape[1], lags, scale),
            **constants(keys.shape[2], dim),
        )
    return OfPending(out, lse, exact, rounded)


def constants(width: int, dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel. width: W = ℓ+1. dim: d, numbers of a head."""
    sizes = {"W": width, "BLOCK_W": padded(width), "PAIRS": dim // 2, "BLOCK": padded(dim // 2)}
    return sizes | {"num_warps": min(16, max(4, padded(width) * padded(dim) // 1024)), "num_stages": 1}
