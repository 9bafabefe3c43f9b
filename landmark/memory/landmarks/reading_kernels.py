"""The kernels of reading.py and step.py: attention to retrieved blocks, read where they are stored, merged with local
attention; and attention of the next tokens to the pending tokens of their block, in shapes that stay.

Nothing is rotated: queries are already rotated for each lag, and keys by their offsets. A program goes over the blocks
of its queries one after the other. Where a few queries read many blocks, most of a GPU would be idle: there several
programs share them, and a second kernel merges their outputs.
"""

# Triton's language only looks like Python, and kernels get their compile-time constants by name.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded
from landmark.memory.splits import merge_constants, merged_splits, splits_of, weighted
from landmark.utils import constants

LOG2_E: tl.constexpr = tl.constexpr(constants.LOG2_E)
QUERIES = 64  # of a tile, where queries share their blocks


def attend_to_retrieved_blocks(
    rotated_queries: Tensor,
    keys: Tensor,
    values: Tensor,
    landmarks: Tensor,
    ages: Tensor,
    *,
    added: int | Tensor,
    recent: int,
    rows: Tensor | None = None,
    local: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    selected: Tensor | None = None,
    alpha: float = 0.0,
) -> Tensor:
    """Attention (B, H, T, d) of queries to their retrieved blocks, merged with local attention.

    rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S. keys, values: (m, ℓ, d), blocks of one head each.
    landmarks: (B, H_kv, capacity, d); block number n, counted from the first ever, is in row n mod capacity. ages: (B,
    H, H_kv or 1, T or 1, q), integer, oldest first; 1 is the newest block. added: blocks ever added; a tensor (),
    int64, is read by the kernel alone, which may be in a CUDA graph. recent: newest blocks with a lag of their own.
    rows: (B, H, T or 1, q), of the blocks in keys and values; None: these have the rows of landmarks, flattened. local:
    output (B, H, T, d) and log-sum-exp (B, H, T) of local attention; None: attention to the blocks alone. weight: (B,
    H, T), factor of the output. selected: (B, H, T), bool, queries that retrieve.
    """
    lags, batch, queries, heads, dim = rotated_queries.shape
    rows_of_landmarks = landmarks.flatten(0, 2)
    sets, count = ages.shape[1], ages.shape[-1]
    shared = ages.shape[2] == 1 and queries > 1 and (rows is None or rows.shape[2] == 1)
    rows = None if rows is None else rows.expand(batch, heads, -1, -1).contiguous()
    out = rotated_queries.new_empty(batch, heads, queries, dim)
    local_out, local_lse = (out, out) if local is None else (x.contiguous() for x in local)
    weight = None if weight is None else weight.float().contiguous()
    selected = None if selected is None else selected.to(torch.int8).contiguous()
    options = read_constants(keys.shape[1], dim, rotated_queries.dtype, shared=shared)
    ages = ages if shared else ages.expand(-1, -1, queries, -1)
    tiles = -(-queries // options["M"])
    splits = splits_of(count, tiles * heads * batch, out.device)
    parts = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
    lse = parts if splits == 1 else parts.new_empty(parts.shape[:-1])
    per_query = out if weight is None else weight, out if selected is None else selected
    number, counter = (0, added) if isinstance(added, Tensor) else (added, ages)
    fixed = {"WEIGHTED": weight is not None, "MASKED": selected is not None, "SPLITS": splits}
    with on_device_of(rotated_queries):
        retrieved_blocks[(tiles * splits, heads, batch)](
            *(rotated_queries, keys, values, rows_of_landmarks, ages, ages if rows is None else rows),
            *(local_out, local_lse, *per_query, parts, lse, counter),
            *(*rotated_queries.stride(), *keys.stride(), *values.stride(), *rows_of_landmarks.stride(), *ages.stride()),
            *(queries, heads, landmarks.shape[1], sets, count, number, landmarks.shape[2], lags, recent),
            LOCAL=local is not None,
            IN_PLACE=rows is None,
            ALPHA=alpha,
            COUNTED=isinstance(added, Tensor),
            **fixed,
            **options,
        )
        if splits > 1:
            merging, all_queries = merge_constants(dim), batch * heads * queries
            grid = (-(-all_queries // merging["M"]),)
            merged_splits[grid](parts, lse, *per_query, out, all_queries, **fixed, **merging)
    return out


def read_constants(block_size: int, dim: int, dtype: torch.dtype, *, shared: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel. shared: all queries share their blocks; else a tile is one query."""
    load = padded(block_size) * padded(dim) * dtype.itemsize // (64 * 128 * 2)  # 1 at 64 halves of dimension 128
    queries = 1 if not shared else 16 if dtype.itemsize != 2 else max(16, QUERIES // max(1, load))
    sizes = {"L": block_size, "D": dim, "BLOCK_D": padded(dim), "SEGMENT": padded(block_size), "M": queries}
    options = {"num_warps": 8 if load > 1 or (shared and dim > 64) else 4, "num_stages": 2 if load <= 1 else 1}
    return {**sizes, "SHARED": shared, "PRECISION": "ieee" if dtype == torch.float32 else "tf32", **options}


@triton.jit(do_not_specialize=["queries", "added", "capacity", "lags"])
def retrieved_blocks(
    Q, Keys, Values, Landmarks, Ages, Rows, LocalOut, LocalLse, Weight, Selected, Out, Lse, Added,
    q_s, q_b, q_t, q_h, q_d, k_n, k_t, k_d, v_n, v_t, v_d, l_n, l_d, a_b, a_h, a_t, a_d,
    queries, heads, kv_heads, sets, count, added, capacity, lags, recent,
    L: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr, M: tl.constexpr,
    SHARED: tl.constexpr, LOCAL: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    IN_PLACE: tl.constexpr, ALPHA: tl.constexpr, SPLITS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Output of M queries of one head that share their blocks, or of one query, by an online softmax over blocks.

    COUNTED: `added` is in Added. SPLITS: programs that share the blocks of these queries. Of several, each writes its
    output (split, B, H, T, D) and log-sum-exp (split, B, H, T), for `merged_splits`; local attention belongs to the
    first.
    """
    if COUNTED:
        added = tl.load(Added)
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head_of_sample = batch * heads + head
    row = tile * M + tl.arange(0, M)
    row_ok = row < queries
    d = tl.arange(0, BLOCK_D)
    d_ok = d < D
    row_index = head_of_sample * queries + row
    here = row_ok[:, None] & d_ok[None, :]
    at = row_index[:, None] * D + d[None, :]
    running = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    if LOCAL:
        running = tl.load(LocalLse + row_index, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        running = tl.where(split == 0, running, float("-inf"))
        total = tl.where(running == float("-inf"), 0.0, 1.0)
        acc = tl.load(LocalOut + at, mask=here, other=0.0).to(tl.float32) * total[:, None]
    kv_head = head * kv_heads // heads
    age_base = Ages + batch * a_b + (head * sets // heads) * a_h
    row_base = Rows + head_of_sample * count
    read = count
    if not SHARED:
        age_base += tile.to(tl.int64) * a_t
        row_base = Rows + (head_of_sample * queries + tile) * count
        if MASKED:
            read = tl.where(tl.load(Selected + head_of_sample * queries + tile) != 0, count, 0)
    offset = tl.arange(0, SEGMENT)
    query_base = Q + batch * q_b + head * q_h + row[:, None].to(tl.int64) * q_t + d[None, :] * q_d
    in_block = offset[:, None] * k_t + d[None, :] * k_d
    in_values = offset[:, None] * v_t + d[None, :] * v_d
    token = (offset < L)[:, None] & d_ok[None, :]
    store_base = (batch * kv_heads + kv_head) * capacity
    first = split * tl.cdiv(count, SPLITS)
    for r in range(first, tl.minimum(first + tl.cdiv(count, SPLITS), read)):
        age = tl.load(age_base + r * a_d).to(tl.int64)
        place = store_base + (added - age) % capacity
        block = place if IN_PLACE else tl.load(row_base + r).to(tl.int64)
        lag = tl.maximum(1, count - r + tl.where(age > recent, lags - count, 0)).to(tl.int64)
        q = tl.load(query_base + (lag - 1) * q_s, mask=here, other=0.0)
        k = tl.load(Keys + block * k_n + in_block, mask=token, other=0.0)
        landmark = tl.load(Landmarks + place * l_n + d * l_d, mask=d_ok, other=0.0)
        gate = tl.sum(q.to(tl.float32) * landmark.to(tl.float32)[None, :], axis=1) * LOG2_E
        if SHARED:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            scores = tl.sum(k.to(tl.float32) * q.to(tl.float32), axis=1)[None, :]
        scores = tl.where((offset < L)[None, :], scores * LOG2_E, float("-inf"))
        largest = tl.max(scores, axis=1)
        weights = tl.exp2(scores - largest[:, None])
        block_sum = tl.sum(weights, axis=1)
        if ALPHA != 0:
            gate += ALPHA * (largest + tl.log2(block_sum))
        larger = tl.maximum(running, gate)
        share = tl.exp2(gate - larger)
        rescale = tl.exp2(running - larger)
        weights = weights * (share / block_sum)[:, None]
        v = tl.load(Values + block * v_n + in_values, mask=token, other=0.0)
        if SHARED:
            acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        else:
            read_here = tl.sum(tl.reshape(weights, (SEGMENT, 1)) * v.to(tl.float32), axis=0)
            acc = acc * rescale[:, None] + read_here[None, :]
        total = total * rescale + share
        running = larger
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    if SPLITS == 1:
        acc = weighted(acc, Weight, Selected, row_index, row_ok, WEIGHTED, MASKED)
        tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=here)
    else:
        split_base = split * tl.num_programs(2).to(tl.int64) * heads * queries
        lse = tl.where(nothing, float("-inf"), running + tl.log2(tl.where(nothing, 1.0, total)))
        tl.store(Lse + split_base + row_index, lse, mask=row_ok)
        tl.store(Out + split_base * D + at, acc, mask=here)


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
            **pending_constants(keys.shape[2], dim),
        )
    return OfPending(out, lse, exact, rounded)


def pending_constants(width: int, dim: int) -> dict[str, Any]:
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
    query_base = Q + batch * q_b + head * q_h + token * q_t + 2 * pair * q_d
    even = tl.load(query_base, mask=pair_ok, other=0.0).to(tl.float32) * scale
    odd = tl.load(query_base + q_d, mask=pair_ok, other=0.0).to(tl.float32) * scale
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
    out_row = (batch * heads + head) * queries + token
    out = Out + out_row * 2 * PAIRS + 2 * pair
    tl.store(out, out_even.to(Out.dtype.element_ty), mask=pair_ok)
    tl.store(out + 1, out_odd.to(Out.dtype.element_ty), mask=pair_ok)
    tl.store(Lse + out_row, largest + tl.log(total))

    if head % group == 0:
        to = in_block + own * 2 * PAIRS + 2 * pair
        from_k = K + batch * k_b + kv_head * k_h + token * k_t + 2 * pair * k_d
        from_v = V + batch * v_b + kv_head * v_h + token * v_t + 2 * pair * v_d
        tl.store(Keys + to, tl.load(from_k, mask=pair_ok, other=0.0), mask=pair_ok)
        tl.store(Keys + to + 1, tl.load(from_k + k_d, mask=pair_ok, other=0.0), mask=pair_ok)
        tl.store(Values + to, tl.load(from_v, mask=pair_ok, other=0.0), mask=pair_ok)
        tl.store(Values + to + 1, tl.load(from_v + v_d, mask=pair_ok, other=0.0), mask=pair_ok)

    lag_base = (batch * queries + token) * heads + head
    for lag in range(1, lags + 1):
        turn = Factors + ((own + lag * W) * PAIRS + pair) * 2
        turn_cosine = tl.load(turn, mask=pair_ok, other=0.0)
        turn_sine = tl.load(turn + 1, mask=pair_ok, other=0.0)
        numbers = lag_base * 2 * PAIRS + 2 * pair
        turned_even, turned_odd = even * turn_cosine - odd * turn_sine, even * turn_sine + odd * turn_cosine
        tl.store(Exact + numbers, turned_even, mask=pair_ok)
        tl.store(Exact + numbers + 1, turned_odd, mask=pair_ok)
        tl.store(Rounded + numbers, turned_even.to(Rounded.dtype.element_ty), mask=pair_ok)
        tl.store(Rounded + numbers + 1, turned_odd.to(Rounded.dtype.element_ty), mask=pair_ok)
        lag_base += tl.num_programs(2).to(tl.int64) * queries * heads
