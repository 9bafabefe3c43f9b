"""Landmark attention as Triton kernels: forward, and backward for queries and for keys and values, or one for both.

Tiles of keys are whole blocks. README.md of landmark.attention has the derivation. Forward, for query i and block b:

1. inner: maximum and sum over the tokens of the block.
2. gate: the landmark's score for an earlier block, plus ALPHA times the inner log-sum-exp; for the query's own
   block the inner log-sum-exp alone; else −∞.
3. share: 2^(gate − running maximum), rescaled as the maximum grows: an online softmax over blocks.

Scores and log-sum-exps are in units of log 2 here. Backward, a small kernel computes D_i. Both kernels of the pair
compute the scores again; the one for queries runs first, and writes the gradient of the context miss token's score,
which the one for keys reads. The kernel for keys alone can do it all (ALL).
"""

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from landmark.attention.fused.tiles import (
    add_rows,
    controlled_landmarks,
    find_tile,
    key_columns,
    load_controlled,
    load_rows,
    logsumexp_of_controlled,
    masked_tiles,
    query_rows,
    softmax_in_blocks,
    store_rows,
)


@triton.jit(do_not_specialize=["samples", "blocks", "rows", "prefix"])
def forward(
    Q, K, V, Out, Lse, Phase, Starts, CmtScores, ControlledLse, Controlled,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
    samples, blocks, rows, prefix, heads, group, scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, CMT: tl.constexpr, ALPHA: tl.constexpr,
    PACKED: tl.constexpr, LEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of M queries of one head. The latest queries, which see the most keys, come first.

    rows: queries of an element of the batch. blocks: columns of Controlled. group: query heads that share
    a key head. scale: factor of the scores, times log₂e.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    sample, begin, queries, phase, tile_of_queries, tiles = find_tile(
        tl.program_id(0), batch, Phase, Starts, samples, rows, M, False, PACKED
    )
    if tile_of_queries >= tiles:
        return
    tile_of_queries, length = tiles - 1 - tile_of_queries, prefix + queries
    local, row, row_ok, rows_key, own, first, last = query_rows(tile_of_queries, phase, prefix, queries, M, W)
    start = begin + tile_of_queries * M
    q = load_rows(Q + batch * q_b + head * q_h, start, local, row_ok, q_t, q_d, D, BLOCK_D)
    k_base = K + batch * k_b + (head // group) * k_h + tl.cast(begin, tl.int64) * k_t
    v_base = V + batch * v_b + (head // group) * v_h + tl.cast(begin, tl.int64) * v_t
    row_index = (batch * heads + head) * rows + begin + row
    controlled_base = Controlled + sample * blocks
    shift, cmt_gate = tl.zeros((M,), tl.float32), tl.full((M,), float("-inf"), tl.float32)
    if CMT:
        controlled_lse = logsumexp_of_controlled(
            q, k_base, controlled_base, own, last, phase, length, blocks, scale, k_t, k_d,
            W, D, BLOCK_D, M, 64, PRECISION,
        )  # fmt: skip
        tl.store(ControlledLse + row_index, controlled_lse, mask=row_ok)
        cmt_score = tl.load(CmtScores + row_index, mask=row_ok, other=0.0)
        unseen = controlled_lse == float("-inf")
        shift = tl.where(unseen, 0.0, cmt_score - tl.where(unseen, 0.0, controlled_lse))
        cmt_gate = tl.where(unseen, cmt_score, float("-inf"))
    running = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    end, masked = masked_tiles(first, last, GROUP)
    for MIXED in tl.static_range(2):  # tiles without a mask, then those with one
        for number in tl.range(0 if MIXED else 1, masked if MIXED else end, disable_licm=LEAN):
            tile = tl.where(number == 0, 0, number + end - 1) if MIXED else number
            first_key, place, valid = key_columns(tile, phase, length, W, GROUP, SEGMENT, MIXED)
            k = load_rows(k_base, first_key, place, valid, k_t, k_d, D, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            exponentials, total, gate, earlier, _ = softmax_in_blocks(
                scores, rows_key, own, tile, phase, length, scale, W, GROUP, SEGMENT, M, MIXED, ALPHA
            )
            if CMT:
                controlled = load_controlled(controlled_base, tile, blocks, GROUP, CMT)
                gate = tl.where((controlled != 0)[None, :] & earlier, gate + shift[:, None], gate)
            larger = tl.maximum(running, tl.max(gate, axis=1))
            safe = tl.where(larger == float("-inf"), 0.0, larger)
            rescale = tl.exp2(running - safe)
            share = tl.exp2(gate - safe[:, None])
            weight = weight * rescale + tl.sum(share, axis=1)
            weights = tl.reshape(exponentials * (share / total)[:, :, None], (M, GROUP * SEGMENT))
            v = load_rows(v_base, first_key, place, valid, v_t, v_d, D, BLOCK_D)
            acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            running = larger
    if CMT:
        larger = tl.maximum(running, cmt_gate)
        larger = tl.where(larger == float("-inf"), 0.0, larger)
        rescale = tl.exp2(running - larger)
        weight = weight * rescale + tl.exp2(cmt_gate - larger)
        acc = acc * rescale[:, None]
        running = larger
    nothing = weight == 0.0
    acc = acc / tl.where(nothing, 1.0, weight)[:, None]
    store_rows(Out + batch * o_b + head * o_h, start, local, row_ok, o_t, o_d, acc, D, BLOCK_D)
    lse = tl.where(nothing, float("-inf"), running + tl.log2(tl.where(nothing, 1.0, weight)))
    tl.store(Lse + row_index, lse, mask=row_ok)


@triton.jit(do_not_specialize=["rows", "tiles"])
def backward_means(
    Out, Do, DLse, Delta, DqSum,
    o_b, o_h, o_t, o_d, do_b, do_h, do_t, do_d,
    rows, heads, tiles, lse_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """D_i, the mean ⟨do, out⟩ of a query, less lse_scale times the gradient of its log-sum-exp, which has the weights
    as derivative. ALL: writes 0 to DqSum. Programs are numbered along one axis, (batch · heads) · tiles.
    """
    program = tl.program_id(0).to(tl.int64)
    tile, head, batch = program % tiles, program // tiles % heads, program // tiles // heads
    offset = tl.arange(0, M)
    row = tile * M + offset
    row_ok = row < rows
    out = load_rows(Out + batch * o_b + head * o_h, tile * M, offset, row_ok, o_t, o_d, D, BLOCK_D)
    do = load_rows(Do + batch * do_b + head * do_h, tile * M, offset, row_ok, do_t, do_d, D, BLOCK_D)
    head_base = (batch * heads + head) * rows
    d_lse = tl.load(DLse + head_base + row, mask=row_ok, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1) - lse_scale * d_lse
    tl.store(Delta + head_base + row, delta, mask=row_ok)
    if ALL:
        nothing = tl.zeros((M, BLOCK_D), tl.float32)
        store_rows(DqSum + head_base * D, tile * M, offset, row_ok, D, 1, nothing, D, BLOCK_D)


@triton.jit
def _gradients(
    q, k, v, do, delta, lse, rows_key, own, shift, controlled_lse, d_cmt_score, controlled, tile, phase, length,
    scale, W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, M: tl.constexpr, MIXED: tl.constexpr,
    CMT: tl.constexpr, ALPHA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights and gradients of the scores, both (M, columns), and the gradient of the shift, (M,).

    delta: (M,), D_i less the gradient of the log-sum-exp. lse: (M,), 0 for a query that sees nothing. controlled:
    (GROUP,), not 0 for controlled landmarks. controlled_lse, d_cmt_score: (M,), for the term that the softmax of the
    controlled landmarks subtracts from their gradient; there is no such term where d_cmt_score is 0.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    exponentials, total, gate, earlier, is_landmark = softmax_in_blocks(
        scores, rows_key, own, tile, phase, length, scale, W, GROUP, SEGMENT, M, MIXED, ALPHA
    )
    in_softmax = earlier & (controlled != 0)[None, :]
    score = gate
    if CMT:
        gate = tl.where(in_softmax, gate + shift[:, None], gate)
    outer = tl.exp2(tl.minimum(gate - lse[:, None], 0.0))  # at most 1, also where the difference is inexact
    weights = exponentials * (outer / total)[:, :, None]
    products = tl.reshape(tl.dot(do, tl.trans(v), input_precision=PRECISION), (M, GROUP, SEGMENT))
    summed = tl.sum(weights * products, axis=2)  # P_ib·D_ib
    d_gate = tl.where(earlier, summed - outer * delta[:, None], 0.0)
    mean = delta[:, None]
    if ALPHA != 1:
        block_mean = summed / tl.where(outer > 0.0, outer, 1.0)  # D_ib
        if ALPHA != 0:
            block_mean += ALPHA * (mean - block_mean)
        mean = tl.where(earlier, block_mean, mean)
    d_scores = weights * (products - mean[:, :, None])
    d_shift = tl.zeros((M,), tl.float32)
    if CMT:
        d_shift = tl.sum(tl.where((controlled != 0)[None, :], d_gate, 0.0), axis=1)
        d_gate -= tl.where(
            in_softmax, tl.exp2(tl.minimum(score - controlled_lse[:, None], 0.0)) * d_cmt_score[:, None], 0.0
        )
    d_scores = tl.where(is_landmark, d_gate[:, :, None], d_scores)
    return tl.reshape(weights, (M, GROUP * SEGMENT)), tl.reshape(d_scores, (M, GROUP * SEGMENT)), d_shift


@triton.jit
def _load_cmt(CmtScores, ControlledLse, row_index, row_ok):
    """The shift of controlled landmarks' gates, their log-sum-exp, the token's score, and whether a query sees none.

    Shift and log-sum-exp are 0 for a query that sees no controlled landmark.
    """
    controlled_lse = tl.load(ControlledLse + row_index, mask=row_ok, other=float("-inf"))
    unseen = controlled_lse == float("-inf")
    controlled_lse = tl.where(unseen, 0.0, controlled_lse)
    cmt_score = tl.load(CmtScores + row_index, mask=row_ok, other=0.0)
    return tl.where(unseen, 0.0, cmt_score - controlled_lse), controlled_lse, cmt_score, unseen


@triton.jit(do_not_specialize=["samples", "blocks", "rows", "prefix"])
def backward_queries(
    Q, K, V, Do, Delta, Lse, Dq, DCmtScores, Phase, Starts, CmtScores, ControlledLse, Controlled,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d,
    dq_b, dq_h, dq_t, dq_d,
    samples, blocks, rows, prefix, heads, group, scale, natural_scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, CMT: tl.constexpr, ALPHA: tl.constexpr,
    PACKED: tl.constexpr, LEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For M queries of one head: their gradient, and the gradient of the context miss token's score."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    sample, begin, queries, phase, tile_of_queries, tiles = find_tile(
        tl.program_id(0), batch, Phase, Starts, samples, rows, M, False, PACKED
    )
    if tile_of_queries >= tiles:
        return
    tile_of_queries, length = tiles - 1 - tile_of_queries, prefix + queries
    local, row, row_ok, rows_key, own, first, last = query_rows(tile_of_queries, phase, prefix, queries, M, W)
    start = begin + tile_of_queries * M
    q = load_rows(Q + batch * q_b + head * q_h, start, local, row_ok, q_t, q_d, D, BLOCK_D)
    do = load_rows(Do + batch * do_b + head * do_h, start, local, row_ok, do_t, do_d, D, BLOCK_D)
    k_base = K + batch * k_b + (head // group) * k_h + tl.cast(begin, tl.int64) * k_t
    v_base = V + batch * v_b + (head // group) * v_h + tl.cast(begin, tl.int64) * v_t
    row_index = (batch * heads + head) * rows + begin + row
    delta = tl.load(Delta + row_index, mask=row_ok, other=0.0)
    lse = tl.load(Lse + row_index, mask=row_ok, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    controlled_base = Controlled + sample * blocks
    nothing = tl.zeros((M,), tl.float32)
    shift, controlled_lse = nothing, nothing
    if CMT:
        shift, controlled_lse, cmt_score, unseen = _load_cmt(CmtScores, ControlledLse, row_index, row_ok)
    dq = tl.zeros((M, BLOCK_D), tl.float32)
    d_shift = tl.zeros((M,), tl.float32)
    end, masked = masked_tiles(first, last, GROUP)
    for MIXED in tl.static_range(2):  # tiles without a mask, then those with one
        for number in tl.range(0 if MIXED else 1, masked if MIXED else end, disable_licm=LEAN):
            tile = tl.where(number == 0, 0, number + end - 1) if MIXED else number
            first_key, place, valid = key_columns(tile, phase, length, W, GROUP, SEGMENT, MIXED)
            k = load_rows(k_base, first_key, place, valid, k_t, k_d, D, BLOCK_D)
            v = load_rows(v_base, first_key, place, valid, v_t, v_d, D, BLOCK_D)
            controlled = load_controlled(controlled_base, tile, blocks, GROUP, CMT)
            _, d_scores, more = _gradients(
                q, k, v, do, delta, lse, rows_key, own, shift, controlled_lse, nothing, controlled, tile, phase,
                length, scale, W, GROUP, SEGMENT, M, MIXED, CMT, ALPHA, PRECISION,
            )  # fmt: skip
            dq += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
            d_shift += more
    if CMT:
        tl.store(DCmtScores + row_index, tl.where(unseen, -delta * tl.exp2(cmt_score - lse), d_shift), mask=row_ok)
        for at in range(0, last, 64):
            landmarks, seen = controlled_landmarks(
                k_base, controlled_base, at, own, phase, length, blocks, k_t, k_d, W, D, BLOCK_D, 64
            )
            scores = tl.dot(q, tl.trans(landmarks), input_precision=PRECISION) * scale
            scores = tl.where(seen, scores - controlled_lse[:, None], float("-inf"))
            taken = tl.exp2(scores) * d_shift[:, None]
            dq -= tl.dot(taken.to(landmarks.dtype), landmarks, input_precision=PRECISION)
    dq_base = Dq + batch * dq_b + head * dq_h
    store_rows(dq_base, start, local, row_ok, dq_t, dq_d, dq * natural_scale, D, BLOCK_D)


@triton.jit(do_not_specialize=["samples", "blocks", "rows", "prefix"])
def backward_keys(
    Q, K, V, Do, Delta, Lse, Dk, Dv, DCmtScores, DqSum, Phase, Starts, CmtScores, ControlledLse, Controlled,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d,
    dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d,
    samples, blocks, rows, prefix, heads, group, scale, natural_scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    SEGMENT: tl.constexpr, CMT: tl.constexpr, ALPHA: tl.constexpr, PACKED: tl.constexpr,
    LEAN: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of GROUP blocks of one key head, from all query heads that share it.

    DqSum: (B, H, rows, D), float32, to which ALL adds the gradient of the queries, without the factor of the scores.
    """
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    sample, begin, length, phase, tile, tiles = find_tile(
        tl.program_id(0), batch, Phase, Starts, samples, prefix + rows, GROUP * W, True, PACKED
    )
    if tile >= tiles:
        return
    queries = length - prefix
    first, place, valid = key_columns(tile, phase, length, W, GROUP, SEGMENT)
    k_base = K + batch * k_b + kv_head * k_h + tl.cast(begin, tl.int64) * k_t
    v_base = V + batch * v_b + kv_head * v_h + tl.cast(begin, tl.int64) * v_t
    k = load_rows(k_base, first, place, valid, k_t, k_d, D, BLOCK_D)
    v = load_rows(v_base, first, place, valid, v_t, v_d, D, BLOCK_D)
    controlled = load_controlled(Controlled + sample * blocks, tile, blocks, GROUP, CMT)
    dk = tl.zeros((GROUP * SEGMENT, BLOCK_D), tl.float32)
    dv = tl.zeros((GROUP * SEGMENT, BLOCK_D), tl.float32)
    # Tiles of queries before `start` see none of the keys; from `beyond` on all blocks of the keys are earlier ones.
    # The first tile of keys may hold an incomplete block.
    start = tl.maximum(tile * GROUP * W - phase - prefix, 0) // M
    end = tl.cdiv(queries, M)
    beyond = tl.cdiv(tl.maximum((tile + 1) * GROUP * W - phase - prefix, 0), M)
    beyond = tl.where((tile == 0) & (phase > 0), end, beyond)
    for member in range(0, group):
        head = kv_head * group + member
        q_base = Q + batch * q_b + head * q_h + tl.cast(begin, tl.int64) * q_t
        do_base = Do + batch * do_b + head * do_h + tl.cast(begin, tl.int64) * do_t
        head_base = (batch * heads + head) * rows + begin
        for LATER in tl.static_range(2):  # queries of blocks that are all later than the keys need no mask
            low, high = (tl.maximum(beyond, start), end) if LATER else (start, tl.minimum(beyond, end))
            for tile_of_queries in tl.range(low, high, disable_licm=LEAN):
                local, row, row_ok, rows_key, own, _, _ = query_rows(tile_of_queries, phase, prefix, queries, M, W)
                q = load_rows(q_base, tile_of_queries * M, local, row_ok, q_t, q_d, D, BLOCK_D)
                do = load_rows(do_base, tile_of_queries * M, local, row_ok, do_t, do_d, D, BLOCK_D)
                lse = tl.load(Lse + head_base + row, mask=row_ok, other=0.0)
                lse = tl.where(lse == float("-inf"), 0.0, lse)
                delta = tl.load(Delta + head_base + row, mask=row_ok, other=0.0)
                nothing = tl.zeros((M,), tl.float32)
                shift, controlled_lse, d_cmt_score = nothing, nothing, nothing
                if CMT:
                    shift, controlled_lse, _, _ = _load_cmt(
                        CmtScores + head_base, ControlledLse + head_base, row, row_ok
                    )
                    d_cmt_score = tl.load(DCmtScores + head_base + row, mask=row_ok, other=0.0)
                weights, d_scores, _ = _gradients(
                    q, k, v, do, delta, lse, rows_key, own, shift, controlled_lse, d_cmt_score, controlled, tile,
                    phase, length, scale, W, GROUP, SEGMENT, M, LATER == 0, CMT, ALPHA, PRECISION,
                )  # fmt: skip
                dv += tl.dot(tl.trans(weights.to(do.dtype)), do, input_precision=PRECISION)
                dk += tl.dot(tl.trans(d_scores.to(q.dtype)), q, input_precision=PRECISION)
                if ALL:
                    dq = tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
                    add_rows(DqSum + head_base * D, tile_of_queries * M, local, row_ok, dq, D, BLOCK_D)
    dk_base = Dk + batch * dk_b + kv_head * dk_h + tl.cast(begin, tl.int64) * dk_t
    dv_base = Dv + batch * dv_b + kv_head * dv_h + tl.cast(begin, tl.int64) * dv_t
    store_rows(dk_base, first, place, valid, dk_t, dk_d, dk * natural_scale, D, BLOCK_D)
    store_rows(dv_base, first, place, valid, dv_t, dv_d, dv, D, BLOCK_D)
