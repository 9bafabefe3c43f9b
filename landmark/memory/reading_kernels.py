"""The kernels of reading.py: attention to retrieved blocks, read where they are stored, merged with local attention.

The gate of a block is the score of its landmark. One softmax runs over the gates of the retrieved blocks and, without a
context miss token, the log-sum-exp of local attention. The tokens of a block share the weight of its gate (paper,
Section 3.2). Nothing is rotated: queries are already rotated for each lag, and keys by their offsets.

A program goes over the blocks of its queries one after the other. Where a few queries read many blocks, most of a GPU
would be idle: there several programs share them, and a second kernel merges what each has found.
"""

from __future__ import annotations

# Triton's language only looks like Python, and kernels get their compile-time constants by name.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import is_interpreted, on_device_of, padded
from landmark.utils import constants

LOG2_E: tl.constexpr = tl.constexpr(constants.LOG2_E)
QUERIES = 64  # of a tile, where queries share their blocks
LEAST = 4  # blocks of a program: the kernel that merges takes as long as about so many


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

    Args:
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        keys, values: (m, ℓ, d), blocks of one head each.
        landmarks: (B, H_kv, capacity, d); block number n, counted from the first ever, is in row n mod capacity.
        ages: (B, H, H_kv or 1, T or 1, q), integer, oldest first; 1 is the newest block.
        added: blocks ever added; a tensor (), int64, is read by the kernel alone, which may be in a CUDA graph.
        recent: number of newest blocks with a lag of their own (`landmark.memory.positions.Lags.own`).
        rows: (B, H, T or 1, q), of the blocks in keys and values; None: these have the rows of landmarks, flattened.
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention; None: attention to the blocks alone.
        weight: (B, H, T), factor of the output. selected: (B, H, T), bool, queries that retrieve.
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
    splits = _splits(count, tiles * heads * batch, out.device)
    parts = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
    lse = parts if splits == 1 else parts.new_empty(parts.shape[:-1])
    of_queries = out if weight is None else weight, out if selected is None else selected
    number, counter = (0, added) if isinstance(added, Tensor) else (added, ages)
    fixed = {"WEIGHTED": weight is not None, "MASKED": selected is not None, "SPLITS": splits}
    with on_device_of(rotated_queries):
        retrieved_blocks[(tiles * splits, heads, batch)](
            *(rotated_queries, keys, values, rows_of_landmarks, ages, ages if rows is None else rows),
            *(local_out, local_lse, *of_queries, parts, lse, counter),
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
            of_merge, all_queries = merge_constants(dim), batch * heads * queries
            grid = (-(-all_queries // of_merge["M"]),)
            merged_splits[grid](parts, lse, *of_queries, out, all_queries, **fixed, **of_merge)
    return out


def _splits(count: int, programs: int, device: torch.device) -> int:
    """Programs that share `count` blocks where there are so many programs without that."""
    if is_interpreted():
        return 1
    return max(1, min(count // LEAST, _processors(device) // programs))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def merge_constants(dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel that merges. dim: d, numbers of a head."""
    return {"D": dim, "BLOCK_D": padded(dim), "M": 4, "num_warps": 4, "num_stages": 1}


def read_constants(block_size: int, dim: int, dtype: torch.dtype, *, shared: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel. shared: all queries share their blocks; else a tile is one query."""
    load = padded(block_size) * padded(dim) * dtype.itemsize // (64 * 128 * 2)  # 1 at 64 halves of dimension 128
    return {
        "L": block_size,
        "D": dim,
        "BLOCK_D": padded(dim),
        "SEGMENT": padded(block_size),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_stages": 2 if load <= 1 else 1,
        "M": (max(16, QUERIES // max(1, load)) if dtype.itemsize == 2 else 16) if shared else 1,
        "SHARED": shared,
        "num_warps": 8 if load > 1 or (shared and dim > 64) else 4,
    }


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

    COUNTED: `added` is in Added.

    SPLITS: programs that share the blocks of these queries. Of several, each writes its output (split, B, H, T, D) and
    log-sum-exp (split, B, H, T), for `merged_splits`; local attention belongs to the first.
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
    of_row = head_of_sample * queries + row
    here = row_ok[:, None] & d_ok[None, :]
    at = of_row[:, None] * D + d[None, :]
    running = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    if LOCAL:
        running = tl.load(LocalLse + of_row, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        running = tl.where(split == 0, running, float("-inf"))
        total = tl.where(running == float("-inf"), 0.0, 1.0)
        acc = tl.load(LocalOut + at, mask=here, other=0.0).to(tl.float32) * total[:, None]
    kv_head = head * kv_heads // heads
    of_ages = Ages + batch * a_b + (head * sets // heads) * a_h
    of_rows = Rows + head_of_sample * count
    read = count
    if not SHARED:
        of_ages += tile.to(tl.int64) * a_t
        of_rows = Rows + (head_of_sample * queries + tile) * count
        if MASKED:
            read = tl.where(tl.load(Selected + head_of_sample * queries + tile) != 0, count, 0)
    offset = tl.arange(0, SEGMENT)
    of_query = Q + batch * q_b + head * q_h + row[:, None].to(tl.int64) * q_t + d[None, :] * q_d
    in_block = offset[:, None] * k_t + d[None, :] * k_d
    in_values = offset[:, None] * v_t + d[None, :] * v_d
    token = (offset < L)[:, None] & d_ok[None, :]
    of_store = (batch * kv_heads + kv_head) * capacity
    first = split * tl.cdiv(count, SPLITS)
    for r in range(first, tl.minimum(first + tl.cdiv(count, SPLITS), read)):
        age = tl.load(of_ages + r * a_d).to(tl.int64)
        place = of_store + (added - age) % capacity
        block = place if IN_PLACE else tl.load(of_rows + r).to(tl.int64)
        lag = tl.maximum(1, count - r + tl.where(age > recent, lags - count, 0)).to(tl.int64)
        q = tl.load(of_query + (lag - 1) * q_s, mask=here, other=0.0)
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
        of_block = tl.sum(weights, axis=1)
        if ALPHA != 0:
            gate += ALPHA * (largest + tl.log2(of_block))
        larger = tl.maximum(running, gate)
        share = tl.exp2(gate - larger)
        rescale = tl.exp2(running - larger)
        weights = weights * (share / of_block)[:, None]
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
        acc = _weighted(acc, Weight, Selected, of_row, row_ok, WEIGHTED, MASKED)
        tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=here)
    else:
        of_split = split * tl.num_programs(2).to(tl.int64) * heads * queries
        lse = tl.where(nothing, float("-inf"), running + tl.log2(tl.where(nothing, 1.0, total)))
        tl.store(Lse + of_split + of_row, lse, mask=row_ok)
        tl.store(Out + of_split * D + at, acc, mask=here)


@triton.jit
def _weighted(acc, Weight, Selected, of_row, row_ok, WEIGHTED: tl.constexpr, MASKED: tl.constexpr):
    """Outputs (M, D) times the weights of their queries, 0 for those that do not retrieve."""
    if WEIGHTED:
        acc = acc * tl.load(Weight + of_row, mask=row_ok, other=0.0)[:, None]
    if MASKED:
        selected = tl.load(Selected + of_row, mask=row_ok, other=0) != 0
        acc = tl.where(selected[:, None], acc, 0.0)
    return acc


@triton.jit(do_not_specialize=["rows"])
def merged_splits(
    Parts, Lse, Weight, Selected, Out, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Outputs of M queries. Parts: (split, rows, D). Lse: (split, rows), of the parts, in units of log 2."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    row_ok, d = row < rows, tl.arange(0, BLOCK_D)
    here = row_ok[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    running = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        lse = tl.load(Lse + split * rows.to(tl.int64) + row, mask=row_ok, other=float("-inf"))
        larger = tl.maximum(running, lse)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        share, rescale = tl.exp2(lse - safe), tl.exp2(running - safe)
        part = tl.load(Parts + split * rows.to(tl.int64) * D + at, mask=here, other=0.0)
        acc = acc * rescale[:, None] + part * share[:, None]
        total = total * rescale + share
        running = larger
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    acc = _weighted(acc, Weight, Selected, row, row_ok, WEIGHTED, MASKED)
    tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=here)
