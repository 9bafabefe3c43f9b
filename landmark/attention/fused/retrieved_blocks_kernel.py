"""Attention to retrieved blocks as a Triton kernel. Its arguments are those of retrieved_blocks.py."""

from __future__ import annotations

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from landmark.utils import constants

LOG2_E: tl.constexpr = tl.constexpr(constants.LOG2_E)


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
