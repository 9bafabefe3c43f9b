"""The kernels of scores.py: the k best landmarks, without a tensor of all scores.

A program scores a tile of landmarks and keeps the k best of them, as integers whose order is that of the pairs of score
and recency. A second kernel takes the k best of these, which are a small part of all landmarks.
"""

# Triton's language only looks like Python, and kernels get their compile-time constants by name.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import LANDMARKS, on_device_of, padded

NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))


def top_k_landmarks(
    rotated_queries: Tensor, landmarks: Tensor, *, added: int | Tensor, recent: int, k: int, tied: bool = False
) -> Tensor:
    """The ages (B, H, T, k), int64, of the best blocks of each query and head, oldest first.

    rotated_queries, landmarks, added: as of `landmarks.reading_kernels`, in float32. recent: newest blocks that
    are scored at a lag that is their age; all older ones at lag S. k: at most MOST_BLOCKS and the number of rows in
    use. tied: whether all older blocks have one and the same score; then recent + k is at most LANDMARKS.
    """
    _, batch, queries, heads, dim = rotated_queries.shape
    kv_heads, capacity = landmarks.shape[1:3]
    blocks = capacity if isinstance(added, Tensor) else min(added, capacity)
    rows = queries * (heads // kv_heads)
    tiles, options = 1 if tied else -(-blocks // LANDMARKS), top_k_constants(rows, dim, k)
    best = rotated_queries.new_empty(batch, heads, queries, tiles * k, dtype=torch.int64)
    ages = best.new_empty(batch, heads, queries, k)
    number, counter = (0, added) if isinstance(added, Tensor) else (added, best)
    with on_device_of(rotated_queries):
        best_of_tile[(tiles, -(-rows // options["M"]), batch * kv_heads)](
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
    """Compile-time constants of the kernel that merges."""
    return {"K": k, "BLOCK_K": padded(k), "BLOCK": 1024, "num_warps": 4, "num_stages": 1}


def top_k_constants(rows: int, dim: int, k: int) -> dict[str, Any]:
    """Compile-time constants of the kernel. rows: queries times the heads that share a key/value head."""
    sizes = {"K": k, "D": dim, "BLOCK_D": padded(dim), "M": 1 if rows == 1 else 16, "N": LANDMARKS}
    return {**sizes, "num_warps": 4 if dim <= 64 else 8, "num_stages": 1}


@triton.jit(do_not_specialize=["queries", "added", "capacity", "recent"])
def best_of_tile(
    Q, Oldest, Landmarks, Best, Added,
    q_s, q_b, q_t, q_h, q_d, l_b, l_h, l_n, l_d,
    queries, heads, kv_heads, added, capacity, recent,
    K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TIED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Pairs of score and recency, as integers, of the K best of N landmarks, for M queries of the heads of a group.

    Oldest: Q at the last lag. TIED: the N newest blocks, of which older ones share a landmark. COUNTED: `added` is in
    Added.
    """
    if COUNTED:
        added = tl.load(Added)
    blocks = tl.minimum(added, capacity).to(tl.int32)
    recent = tl.minimum(recent, blocks)
    kv_index = tl.program_id(2).to(tl.int64)
    batch, kv_head, group = kv_index // kv_heads, kv_index % kv_heads, heads // kv_heads
    row = tl.program_id(1) * M + tl.arange(0, M)
    query, head = (row // group).to(tl.int64), kv_head * group + row % group
    d = tl.arange(0, BLOCK_D)
    here = (query < queries)[:, None] & (d < D)[None, :]
    query_base = batch * q_b + query[:, None] * q_t + head[:, None] * q_h + d[None, :] * q_d
    first = tl.program_id(0) * N
    last = first + N
    if TIED:
        last = capacity
        age = tl.arange(0, N) + 1
        place = (added - tl.minimum(age, recent + 1)) % capacity
        exists = age <= tl.minimum(blocks, recent + K)
    else:
        place = first + tl.arange(0, N)
        age = (added - 1 - place) % capacity + 1
        exists = place < blocks
    head_base = Landmarks + batch * l_b + kv_head * l_h
    landmark_ptr = head_base + place[:, None].to(tl.int64) * l_n + d[None, :] * l_d
    landmarks = tl.load(landmark_ptr, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    q = tl.load(Oldest + query_base, mask=here, other=0.0)
    if M == 1:
        scores = tl.sum(landmarks * q, axis=1)[None, :]
    else:
        scores = tl.dot(q, tl.trans(landmarks), input_precision="ieee")
    lag_base = Q + query_base
    for newest in range(1, recent + 1):  # blocks with a lag of their own
        newer = (added - newest) % capacity
        if (newer >= first) & (newer < last):
            landmark = tl.load(head_base + newer.to(tl.int64) * l_n + d * l_d, mask=d < D, other=0.0)
            q = tl.load(lag_base, mask=here, other=0.0)
            scores = tl.where((place == newer)[None, :], tl.sum(q * landmark[None, :], axis=1)[:, None], scores)
        lag_base += q_s
    # The bits of a float, read as an integer, have its order; those of negative ones are turned round. −0 becomes 0.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    recency = 0x7FFFFFFF - age
    pairs = (bits.to(tl.int64) << 32) | recency.to(tl.int64)[None, :]
    pairs = tl.where(exists[None, :], pairs, NOTHING)
    best_base = Best + (((batch * heads + head) * queries + query) * tl.num_programs(0) + tl.program_id(0)) * K
    for rank in tl.static_range(K):
        best = tl.max(pairs, axis=1)
        tl.store(best_base + rank, best, mask=query < queries)
        pairs = tl.where(pairs == best[:, None], NOTHING, pairs)


@triton.jit(do_not_specialize=["count"])
def best_of_tiles(Best, Ages, count, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    """The ages of the K best of a row's pairs, oldest first. Best: (rows, count). Ages: (rows, K)."""
    row = tl.program_id(0).to(tl.int64)
    rank, within = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
    chosen = tl.full((BLOCK_K,), NOTHING, tl.int64)
    for first in range(0, count, BLOCK):
        here = first + within < count
        pairs = tl.load(Best + row * count + first + within, mask=here, other=NOTHING)
        before, chosen = chosen, tl.full((BLOCK_K,), NOTHING, tl.int64)
        for place in tl.static_range(K):
            best = tl.maximum(tl.max(pairs, axis=0), tl.max(before, axis=0))
            chosen = tl.where(rank == place, best, chosen)
            pairs = tl.where(pairs == best, NOTHING, pairs)
            before = tl.where(before == best, NOTHING, before)
    ages = tl.where(rank < K, 0x7FFFFFFF - (chosen & 0x7FFFFFFF), 0)
    for place in tl.static_range(K):
        oldest = tl.max(ages, axis=0)
        tl.store(Ages + row * K + place, oldest)
        ages = tl.where(ages == oldest, 0, ages)
