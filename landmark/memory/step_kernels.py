"""The kernel of step.py: attention of the next tokens to the pending tokens of their block, in shapes that stay.

It does what is done before blocks are chosen: writes the new keys and values, rotates keys and queries, attends, and
rotates the queries for each lag. The number of pending tokens is read by the kernel alone.
"""

from __future__ import annotations

# Triton's language only looks like Python, and kernels get their compile-time constants by name.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded


class OfPending(NamedTuple):
    """Output (B, H, T, d) and log-sum-exp (B, H, T) of local attention, and the queries (S, B, T, H, d), scaled, and
    rotated for lag 1…S, in float32 and in their type."""

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

    q: (B, H, T, d), k, v: (B, H_kv, T, d), not rotated. keys, values: (B, H_kv, W, d), of the block's tokens; the new
    ones are written to them. pending: (), int64, tokens before the new ones. factors: ((S + 1) W, d/2, 2), float32,
    cosines and sines of positions 0, 1, 2, …. lags: S; lag s is s · W positions further.
    """
    batch, heads, queries, dim = q.shape
    out, lse = q.new_empty(batch, heads, queries, dim), q.new_empty(batch, heads, queries, dtype=torch.float32)
    exact = q.new_empty(lags, batch, queries, heads, dim, dtype=torch.float32)
    rounded = exact if q.dtype == torch.float32 else exact.new_empty(exact.shape, dtype=q.dtype)
    with on_device_of(q):
        pending_tokens[(queries, heads, batch)](
            *(q, k, v, keys, values, pending, factors, out, lse, exact, rounded),
            *(*q.stride(), *k.stride(), *v.stride(), heads, k.shape[1], lags, scale),
            **constants(keys.shape[2], dim),
        )
    return OfPending(out, lse, exact, rounded)


def constants(width: int, dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel. width: W = ℓ+1. dim: d, numbers of a head."""
    sizes = {"W": width, "BLOCK_W": padded(width), "PAIRS": dim // 2, "BLOCK": padded(dim // 2)}
    return sizes | {"num_warps": min(16, max(4, padded(width) * padded(dim) // 1024)), "num_stages": 1}


@triton.jit(do_not_specialize=["lags"])
def pending_tokens(
    Q, K, V, Keys, Values, Pending, Factors, Out, Lse, Exact, Rounded,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d,
    heads, kv_heads, lags, scale,
    W: tl.constexpr, BLOCK_W: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query of one head: what it finds in its block, and itself rotated for lag 1…lags.

    Keys and values of new tokens are taken from K and V by every head that reads them, and written by one of them.
    """
    token, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    queries, group = tl.num_programs(0), heads // kv_heads
    kv_head = head // group
    pending = tl.load(Pending).to(tl.int32)
    own = pending + token  # place of the token in its block
    pair = tl.arange(0, BLOCK)
    pair_ok = pair < PAIRS
    of_query = Q + batch * q_b + head * q_h + token * q_t + 2 * pair * q_d
    even = tl.load(of_query, mask=pair_ok, other=0.0).to(tl.float32) * scale
    odd = tl.load(of_query + q_d, mask=pair_ok, other=0.0).to(tl.float32) * scale
    cosine = tl.load(Factors + (own * PAIRS + pair) * 2, mask=pair_ok, other=0.0)
    sine = tl.load(Factors + (own * PAIRS + pair) * 2 + 1, mask=pair_ok, other=0.0)
    q_even, q_odd = even * cosine - odd * sine, even * sine + odd * cosine

    slot = tl.arange(0, BLOCK_W)[:, None]
    in_block = (batch * kv_heads + kv_head) * W * 2 * PAIRS
    stored = in_block + slot * 2 * PAIRS + 2 * pair[None, :]
    is_old = (slot < pending) & pair_ok[None, :]
    is_new = (slot >= pending) & (slot <= own) & pair_ok[None, :]
    new_k = K + batch * k_b + kv_head * k_h + (slot - pending) * k_t + 2 * pair[None, :] * k_d
    new_v = V + batch * v_b + kv_head * v_h + (slot - pending) * v_t + 2 * pair[None, :] * v_d
    at = (slot * PAIRS + pair[None, :]) * 2
    here = (slot < W) & pair_ok[None, :]
    cosine = tl.load(Factors + at, mask=here, other=0.0)
    sine = tl.load(Factors + at + 1, mask=here, other=0.0)
    k_even = tl.load(Keys + stored, mask=is_old, other=0.0).to(tl.float32)
    k_even += tl.load(new_k, mask=is_new, other=0.0).to(tl.float32)
    products = k_even * (cosine * q_even[None, :] + sine * q_odd[None, :])  # the key is rotated, or the query back
    k_odd = tl.load(Keys + stored + 1, mask=is_old, other=0.0).to(tl.float32)
    k_odd += tl.load(new_k + k_d, mask=is_new, other=0.0).to(tl.float32)
    scores = tl.sum(products + k_odd * (cosine * q_odd[None, :] - sine * q_even[None, :]), axis=1)
    place = tl.arange(0, BLOCK_W)
    scores = tl.where((place <= own) & (place < W - 1), scores, float("-inf"))  # the block's landmark is ignored
    largest = tl.max(scores, axis=0)
    weights = tl.exp(scores - largest)
    total = tl.sum(weights, axis=0)
    weights = (weights / total)[:, None]
    v_even = tl.load(Values + stored, mask=is_old, other=0.0).to(tl.float32)
    v_even += tl.load(new_v, mask=is_new, other=0.0).to(tl.float32)
    v_odd = tl.load(Values + stored + 1, mask=is_old, other=0.0).to(tl.float32)
    v_odd += tl.load(new_v + v_d, mask=is_new, other=0.0).to(tl.float32)
    out_even, out_odd = tl.sum(v_even * weights, axis=0), tl.sum(v_odd * weights, axis=0)
    of_out = (batch * heads + head) * queries + token
    out = Out + of_out * 2 * PAIRS + 2 * pair
    tl.store(out, out_even.to(Out.dtype.element_ty), mask=pair_ok)
    tl.store(out + 1, out_odd.to(Out.dtype.element_ty), mask=pair_ok)
    tl.store(Lse + of_out, largest + tl.log(total))

    if head % group == 0:
        to = in_block + own * 2 * PAIRS + 2 * pair
        from_k = K + batch * k_b + kv_head * k_h + token * k_t + 2 * pair * k_d
        from_v = V + batch * v_b + kv_head * v_h + token * v_t + 2 * pair * v_d
        tl.store(Keys + to, tl.load(from_k, mask=pair_ok, other=0.0), mask=pair_ok)
        tl.store(Keys + to + 1, tl.load(from_k + k_d, mask=pair_ok, other=0.0), mask=pair_ok)
        tl.store(Values + to, tl.load(from_v, mask=pair_ok, other=0.0), mask=pair_ok)
        tl.store(Values + to + 1, tl.load(from_v + v_d, mask=pair_ok, other=0.0), mask=pair_ok)

    of_lag = (batch * queries + token) * heads + head
    for lag in range(1, lags + 1):
        turn = Factors + ((own + lag * W) * PAIRS + pair) * 2
        turn_cosine = tl.load(turn, mask=pair_ok, other=0.0)
        turn_sine = tl.load(turn + 1, mask=pair_ok, other=0.0)
        numbers = of_lag * 2 * PAIRS + 2 * pair
        turned_even, turned_odd = even * turn_cosine - odd * turn_sine, even * turn_sine + odd * turn_cosine
        tl.store(Exact + numbers, turned_even, mask=pair_ok)
        tl.store(Exact + numbers + 1, turned_odd, mask=pair_ok)
        tl.store(Rounded + numbers, turned_even.to(Rounded.dtype.element_ty), mask=pair_ok)
        tl.store(Rounded + numbers + 1, turned_odd.to(Rounded.dtype.element_ty), mask=pair_ok)
        of_lag += tl.num_programs(2).to(tl.int64) * queries * heads
