"""Landmark attention as Triton kernels: tiles of whole blocks of keys, an online softmax over blocks.

A tile of keys holds GROUP blocks, each in SEGMENT ≥ W = ℓ+1 columns, so that what is said of a block is a reduction
over a segment: scores (M, GROUP·SEGMENT) are seen as (M, GROUP, SEGMENT). For query i and block b

    inner    max and sum over the tokens of the block
    gate     the landmark's score for an earlier block, the inner log-sum-exp for the query's own, else −∞
    share    2^(gate − running maximum), rescaled as the maximum grows: an online softmax, of blocks

Only the outer log-sum-exp is kept for the way back, where P_ib = 2^(gate − lse) and a block's own mean D_ib is a sum
over its segment. Scores and log-sum-exps are in units of log 2 here. Where blocks begin depends on the sample's phase,
which is read from memory: no phase, prefix or length makes another kernel.

With a context miss token, `shift` is added to the gates of controlled landmarks and `nowhere` is the score of what goes
nowhere: see context_miss.py.
"""

from __future__ import annotations

# Compile-time constants are given as plain numbers.
# pyright: reportArgumentType=false
import triton
import triton.language as tl


@triton.jit
def _columns(tile, phase, length, W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr):
    """Of a tile of keys the first, and of each column how far its key stands from it, and whether there is one."""
    column = tl.arange(0, GROUP * SEGMENT)
    offset = column % SEGMENT
    start = tile * GROUP * W - phase
    place = column // SEGMENT * W + offset
    return start, place, (offset < W) & (start + place >= 0) & (start + place < length)


@triton.jit
def _load(base, start, place, valid, stride, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows start + place (rows, BLOCK_D) of a matrix, 0 where there is none."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + (tl.full((), 0, tl.int64) + start) * stride + (place[:, None] * stride + d[None, :] * stride_d)
    return tl.load(pointers, mask=valid[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _store(base, start, place, valid, stride, stride_d, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    pointers = base + (tl.full((), 0, tl.int64) + start) * stride + (place[:, None] * stride + d[None, :] * stride_d)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=valid[:, None] & (d[None, :] < D))


@triton.jit
def _gates(
    scores,
    rows_key,
    own,
    shift,
    controlled,
    tile,
    phase,
    length,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    M: tl.constexpr,
    MIXED: tl.constexpr,
    CMT: tl.constexpr,
):
    """Of a tile of scores (M, columns): exponentials within blocks (M, GROUP, SEGMENT), their sums, the gates and where
    blocks are earlier ones, (M, GROUP).

    rows_key: (M,), the key of each query. own: (M,), its block. MIXED: some block of the tile is not earlier than all
    queries' own.
    """
    scores = tl.reshape(scores, (M, GROUP, SEGMENT))
    offset = tl.arange(0, SEGMENT)[None, :]
    block = tile * GROUP + tl.arange(0, GROUP)[:, None]
    key = block * W + offset - phase
    is_token = (offset < W - 1) & (key >= 0) & (key < length)
    gate = tl.sum(tl.where((offset == W - 1)[None, :, :], scores, 0.0), axis=2)
    block = tile * GROUP + tl.arange(0, GROUP)[None, :]
    earlier = block < own[:, None]
    if MIXED:
        visible = is_token[None, :, :] & (key[None, :, :] <= rows_key[:, None, None])
        scores = tl.where(visible, scores, float("-inf"))
    else:
        scores = tl.where(is_token[None, :, :], scores, float("-inf"))
    largest = tl.max(scores, axis=2)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    exponentials = tl.exp2(scores - largest[:, :, None])
    total = tl.sum(exponentials, axis=2)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if CMT:
        gate = tl.where((controlled != 0)[None, :] & earlier, gate + shift[:, None], gate)
    if MIXED:
        gate = tl.where(block == own[:, None], largest + tl.log2(total), gate)
        gate = tl.where(block <= own[:, None], gate, float("-inf"))
    gate = tl.where(empty, float("-inf"), gate)
    return exponentials, total, gate, earlier


@triton.jit(do_not_specialize=["blocks", "queries", "prefix"])
def forward(
    Q,
    K,
    V,
    Out,
    Lse,
    Phase,
    Shift,
    Nowhere,
    Controlled,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_h,
    k_t,
    k_d,
    v_b,
    v_h,
    v_t,
    v_d,
    o_b,
    o_h,
    o_t,
    o_d,
    blocks,
    queries,
    prefix,
    heads,
    group,
    scale,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    CMT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of M queries of one head. The latest queries, which see the most keys, come first.

    blocks: of a sample in Controlled. group: query heads of one key head. scale: of the scores, log₂e in it.
    """
    tile_of_queries = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    phase, length = tl.load(Phase + batch), prefix + queries
    local = tl.arange(0, M)
    row = tile_of_queries * M + local
    row_ok = row < queries
    rows_key = prefix + row
    own = (phase + rows_key) // W
    first = (phase + prefix + tile_of_queries * M) // W
    last = (phase + prefix + tl.minimum(tile_of_queries * M + M, queries) - 1) // W
    q = _load(Q + batch.to(tl.int64) * q_b + head * q_h, tile_of_queries * M, local, row_ok, q_t, q_d, D, BLOCK_D)
    k_base = K + batch.to(tl.int64) * k_b + (head // group) * k_h
    v_base = V + batch.to(tl.int64) * v_b + (head // group) * v_h
    of_row = (tl.program_id(1).to(tl.int64) * queries) + row
    shift = tl.zeros((M,), tl.float32)
    if CMT:
        shift = tl.load(Shift + of_row, mask=row_ok, other=0.0)
    running = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    for tile in range(0, first // GROUP):
        running, weight, acc = _forward_tile(
            q, k_base, v_base, Controlled + batch * blocks, running, weight, acc, rows_key, own, shift, tile, phase,
            length, blocks, scale, k_t, k_d, v_t, v_d, W, D, BLOCK_D, M, GROUP, SEGMENT, False, CMT, PRECISION,
        )  # fmt: skip
    for tile in range(first // GROUP, last // GROUP + 1):
        running, weight, acc = _forward_tile(
            q, k_base, v_base, Controlled + batch * blocks, running, weight, acc, rows_key, own, shift, tile, phase,
            length, blocks, scale, k_t, k_d, v_t, v_d, W, D, BLOCK_D, M, GROUP, SEGMENT, True, CMT, PRECISION,
        )  # fmt: skip
    if CMT:
        nowhere = tl.load(Nowhere + of_row, mask=row_ok, other=float("-inf"))
        larger = tl.maximum(running, nowhere)
        larger = tl.where(larger == float("-inf"), 0.0, larger)
        rescale = tl.exp2(running - larger)
        weight = weight * rescale + tl.exp2(nowhere - larger)
        acc = acc * rescale[:, None]
        running = larger
    nothing = weight == 0.0
    acc = acc / tl.where(nothing, 1.0, weight)[:, None]
    _store(Out + batch.to(tl.int64) * o_b + head * o_h, tile_of_queries * M, local, row_ok, o_t, o_d, acc, D, BLOCK_D)
    lse = tl.where(nothing, float("-inf"), running + tl.log2(tl.where(nothing, 1.0, weight)))
    tl.store(Lse + of_row, lse, mask=row_ok)


@triton.jit
def _forward_tile(
    q, k_base, v_base, controlled_base, running, weight, acc, rows_key, own, shift, tile, phase, length, blocks, scale,
    k_t, k_d, v_t, v_d,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, MIXED: tl.constexpr, CMT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start, place, valid = _columns(tile, phase, length, W, GROUP, SEGMENT)
    k = _load(k_base, start, place, valid, k_t, k_d, D, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    controlled = _controlled(controlled_base, tile, blocks, GROUP, CMT)
    exponentials, total, gate, _ = _gates(
        scores, rows_key, own, shift, controlled, tile, phase, length, W, GROUP, SEGMENT, M, MIXED, CMT
    )
    larger = tl.maximum(running, tl.max(gate, axis=1))
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    rescale = tl.exp2(running - safe)
    share = tl.exp2(gate - safe[:, None])
    weight = weight * rescale + tl.sum(share, axis=1)
    weights = tl.reshape(exponentials * (share / total)[:, :, None], (M, GROUP * SEGMENT))
    v = _load(v_base, start, place, valid, v_t, v_d, D, BLOCK_D)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return larger, weight, acc


@triton.jit
def _controlled(base, tile, blocks, GROUP: tl.constexpr, CMT: tl.constexpr):
    """(GROUP,), not 0 where the context miss token controls the block's landmark."""
    block = tile * GROUP + tl.arange(0, GROUP)
    if CMT:
        return tl.load(base + block, mask=block < blocks, other=0)
    return block * 0


@triton.jit
def _gradients(
    q, k, v, do, delta, lse, rows_key, own, shift, controlled, tile, phase, length, scale,
    W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, M: tl.constexpr, MIXED: tl.constexpr,
    CMT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights and gradients of the scores, (M, columns), and those of the shift, (M,).

    delta: (M,), D_i. lse: (M,), 0 for a query that sees nothing.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    exponentials, total, gate, earlier = _gates(
        scores, rows_key, own, shift, controlled, tile, phase, length, W, GROUP, SEGMENT, M, MIXED, CMT
    )
    outer = tl.exp2(gate - lse[:, None])
    weights = exponentials * (outer / total)[:, :, None]
    products = tl.reshape(tl.dot(do, tl.trans(v), input_precision=PRECISION), (M, GROUP, SEGMENT)) * weights
    summed = tl.sum(products, axis=2)  # P_ib·D_ib
    d_gate = tl.where(earlier, summed - outer * delta[:, None], 0.0)
    mean = tl.where(earlier, summed / tl.where(outer > 0.0, outer, 1.0), delta[:, None])
    d_scores = products - weights * mean[:, :, None]
    is_landmark = (tl.arange(0, SEGMENT) == W - 1)[None, None, :]
    d_scores = tl.where(is_landmark, d_gate[:, :, None], d_scores)
    d_shift = tl.zeros((M,), tl.float32)
    if CMT:
        d_shift = tl.sum(tl.where((controlled != 0)[None, :], d_gate, 0.0), axis=1)
    return tl.reshape(weights, (M, GROUP * SEGMENT)), tl.reshape(d_scores, (M, GROUP * SEGMENT)), d_shift


@triton.jit(do_not_specialize=["blocks", "queries", "prefix"])
def backward_queries(
    Q, K, V, Do, Delta, Lse, Dq, Dshift, Phase, Shift, Controlled,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d, dq_b, dq_h, dq_t, dq_d,
    blocks, queries, prefix, heads, group, scale, natural_scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, CMT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of M queries of one head."""
    tile_of_queries = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    phase, length = tl.load(Phase + batch), prefix + queries
    local = tl.arange(0, M)
    row = tile_of_queries * M + local
    row_ok = row < queries
    rows_key = prefix + row
    own = (phase + rows_key) // W
    first = (phase + prefix + tile_of_queries * M) // W
    last = (phase + prefix + tl.minimum(tile_of_queries * M + M, queries) - 1) // W
    q = _load(Q + batch.to(tl.int64) * q_b + head * q_h, tile_of_queries * M, local, row_ok, q_t, q_d, D, BLOCK_D)
    do = _load(Do + batch.to(tl.int64) * o_b + head * o_h, tile_of_queries * M, local, row_ok, o_t, o_d, D, BLOCK_D)
    k_base = K + batch.to(tl.int64) * k_b + (head // group) * k_h
    v_base = V + batch.to(tl.int64) * v_b + (head // group) * v_h
    of_row = (tl.program_id(1).to(tl.int64) * queries) + row
    lse = tl.load(Lse + of_row, mask=row_ok, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(Delta + of_row, mask=row_ok, other=0.0)
    shift = tl.zeros((M,), tl.float32)
    if CMT:
        shift = tl.load(Shift + of_row, mask=row_ok, other=0.0)
    dq = tl.zeros((M, BLOCK_D), tl.float32)
    d_shift = tl.zeros((M,), tl.float32)
    for tile in range(0, first // GROUP):
        start, place, valid = _columns(tile, phase, length, W, GROUP, SEGMENT)
        k = _load(k_base, start, place, valid, k_t, k_d, D, BLOCK_D)
        v = _load(v_base, start, place, valid, v_t, v_d, D, BLOCK_D)
        controlled = _controlled(Controlled + batch * blocks, tile, blocks, GROUP, CMT)
        _, d_scores, more = _gradients(
            q, k, v, do, delta, lse, rows_key, own, shift, controlled, tile, phase, length, scale,
            W, GROUP, SEGMENT, M, False, CMT, PRECISION,
        )  # fmt: skip
        dq += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
        d_shift += more
    for tile in range(first // GROUP, last // GROUP + 1):
        start, place, valid = _columns(tile, phase, length, W, GROUP, SEGMENT)
        k = _load(k_base, start, place, valid, k_t, k_d, D, BLOCK_D)
        v = _load(v_base, start, place, valid, v_t, v_d, D, BLOCK_D)
        controlled = _controlled(Controlled + batch * blocks, tile, blocks, GROUP, CMT)
        _, d_scores, more = _gradients(
            q, k, v, do, delta, lse, rows_key, own, shift, controlled, tile, phase, length, scale,
            W, GROUP, SEGMENT, M, True, CMT, PRECISION,
        )  # fmt: skip
        dq += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
        d_shift += more
    dq_base = Dq + batch.to(tl.int64) * dq_b + head * dq_h
    _store(dq_base, tile_of_queries * M, local, row_ok, dq_t, dq_d, dq * natural_scale, D, BLOCK_D)
    if CMT:
        tl.store(Dshift + of_row, d_shift, mask=row_ok)


@triton.jit(do_not_specialize=["blocks", "queries", "prefix"])
def backward_keys(
    Q, K, V, Do, Delta, Lse, Dk, Dv, Phase, Shift, Controlled,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
    dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d,
    blocks, queries, prefix, heads, group, scale, natural_scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, CMT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of GROUP blocks of one key head, from all query heads that share it."""
    tile = tl.program_id(0)
    kv_heads = heads // group
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    phase, length = tl.load(Phase + batch), prefix + queries
    first, place, valid = _columns(tile, phase, length, W, GROUP, SEGMENT)
    k = _load(K + batch.to(tl.int64) * k_b + kv_head * k_h, first, place, valid, k_t, k_d, D, BLOCK_D)
    v = _load(V + batch.to(tl.int64) * v_b + kv_head * v_h, first, place, valid, v_t, v_d, D, BLOCK_D)
    controlled = _controlled(Controlled + batch * blocks, tile, blocks, GROUP, CMT)
    dk = tl.zeros((GROUP * SEGMENT, BLOCK_D), tl.float32)
    dv = tl.zeros((GROUP * SEGMENT, BLOCK_D), tl.float32)
    # Queries before `start` see none of the tile's keys, those from `beyond` on see all of its blocks as earlier ones.
    start = tl.maximum(tile * GROUP * W - phase - prefix, 0) // M
    beyond = tl.cdiv(tl.maximum((tile + 1) * GROUP * W - phase - prefix, 0), M)
    end = tl.cdiv(queries, M)
    for member in range(0, group):
        head = kv_head * group + member
        q_base = Q + batch.to(tl.int64) * q_b + head * q_h
        do_base = Do + batch.to(tl.int64) * o_b + head * o_h
        of_head = (batch * heads + head).to(tl.int64) * queries
        for tile_of_queries in range(start, tl.minimum(beyond, end)):
            dk, dv = _backward_tile(
                q_base, do_base, k, v, dk, dv, Delta + of_head, Lse + of_head, Shift + of_head, controlled,
                tile_of_queries, tile, phase, prefix, queries, scale, q_t, q_d, o_t, o_d,
                W, D, BLOCK_D, M, GROUP, SEGMENT, True, CMT, PRECISION,
            )  # fmt: skip
        for tile_of_queries in range(tl.maximum(beyond, start), end):
            dk, dv = _backward_tile(
                q_base, do_base, k, v, dk, dv, Delta + of_head, Lse + of_head, Shift + of_head, controlled,
                tile_of_queries, tile, phase, prefix, queries, scale, q_t, q_d, o_t, o_d,
                W, D, BLOCK_D, M, GROUP, SEGMENT, False, CMT, PRECISION,
            )  # fmt: skip
    dk_base = Dk + batch.to(tl.int64) * dk_b + kv_head * dk_h
    dv_base = Dv + batch.to(tl.int64) * dv_b + kv_head * dv_h
    _store(dk_base, first, place, valid, dk_t, dk_d, dk * natural_scale, D, BLOCK_D)
    _store(dv_base, first, place, valid, dv_t, dv_d, dv, D, BLOCK_D)


@triton.jit
def _backward_tile(
    q_base, do_base, k, v, dk, dv, delta_base, lse_base, shift_base, controlled, tile_of_queries, tile, phase, prefix,
    queries, scale, q_t, q_d, o_t, o_d,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, MIXED: tl.constexpr, CMT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    local = tl.arange(0, M)
    row = tile_of_queries * M + local
    row_ok = row < queries
    rows_key = prefix + row
    own = (phase + rows_key) // W
    q = _load(q_base, tile_of_queries * M, local, row_ok, q_t, q_d, D, BLOCK_D)
    do = _load(do_base, tile_of_queries * M, local, row_ok, o_t, o_d, D, BLOCK_D)
    lse = tl.load(lse_base + row, mask=row_ok, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(delta_base + row, mask=row_ok, other=0.0)
    shift = tl.zeros((M,), tl.float32)
    if CMT:
        shift = tl.load(shift_base + row, mask=row_ok, other=0.0)
    weights, d_scores, _ = _gradients(
        q, k, v, do, delta, lse, rows_key, own, shift, controlled, tile, phase, prefix + queries, scale,
        W, GROUP, SEGMENT, M, MIXED, CMT, PRECISION,
    )  # fmt: skip
    dv += tl.dot(tl.trans(weights.to(do.dtype)), do, input_precision=PRECISION)
    dk += tl.dot(tl.trans(d_scores.to(q.dtype)), q, input_precision=PRECISION)
    return dk, dv
