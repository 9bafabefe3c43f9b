"""The forward pass of landmark attention as a Triton kernel. Tiles of keys are whole blocks. For query i and block b:

1. inner: maximum and sum over the tokens of the block.
2. gate: the landmark's score for an earlier block, plus ALPHA times the inner log-sum-exp; for the query's own
   block the inner log-sum-exp alone; else −∞.
3. share: 2^(gate − running maximum), rescaled as the maximum grows: an online softmax over blocks.

Only the outer log-sum-exp is kept for the backward pass. Scores and log-sum-exps are in units of log 2 here. The kernel
reads each sample's phase from memory, so one compiled kernel serves every phase, prefix and length.

With a context miss token the gate of a controlled landmark is cmt_score + score − controlled_lse, where controlled_lse
is the log-sum-exp of the controlled landmarks that the query sees. Where it sees none the token itself takes part, with
the gate cmt_score and without a value (scoring.py).
"""

from __future__ import annotations

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from landmark.attention.fused.tiles import (
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
    of_row = (batch * heads + head) * rows + begin + row
    controlled_base = Controlled + sample * blocks
    shift, cmt_gate = tl.zeros((M,), tl.float32), tl.full((M,), float("-inf"), tl.float32)
    if CMT:
        controlled_lse = logsumexp_of_controlled(
            q, k_base, controlled_base, own, last, phase, length, blocks, scale, k_t, k_d,
            W, D, BLOCK_D, M, 64, PRECISION,
        )  # fmt: skip
        tl.store(ControlledLse + of_row, controlled_lse, mask=row_ok)
        cmt_score = tl.load(CmtScores + of_row, mask=row_ok, other=0.0)
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
    tl.store(Lse + of_row, lse, mask=row_ok)
