"""The scores of whole blocks as a Triton kernel. Its arguments are those of block_scores.py."""

from __future__ import annotations

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from landmark.utils import constants

LOG2_E: tl.constexpr = tl.constexpr(constants.LOG2_E)


@triton.jit(do_not_specialize=["added", "capacity"])
def block_scores(
    Q, Keys, Landmarks, Ages, Lags, Scores,
    q_s, q_b, q_t, q_h, q_d, k_n, k_t, k_d, l_n, l_d, a_b, a_h, a_t, a_d, g_b, g_h, g_t, g_d,
    kv_heads, count, added, capacity,
    HEADS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr,
    M: tl.constexpr, ONE_LAG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the blocks of one query, for the HEADS heads that choose together, one block after the other.

    ONE_LAG: all lags are 1.
    """
    queries, sets = tl.num_programs(0), tl.num_programs(1)
    query, own, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = own * kv_heads // sets
    row, d, offset = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    row_ok, d_ok, token_ok = row < HEADS, d < D, offset < L
    here = row_ok[:, None] & d_ok[None, :]
    of_query = Q + batch * q_b + query * q_t + (own * HEADS + row)[:, None] * q_h + d[None, :] * q_d
    of_ages = Ages + batch * a_b + own * a_h + query * a_t
    of_lags = Lags + batch * g_b + own * g_h + query * g_t
    of_scores = Scores + (((batch * sets + own) * HEADS + row) * queries + query) * count
    of_store = (batch * kv_heads + kv_head) * capacity
    in_block = offset[:, None] * k_t + d[None, :] * k_d
    if ONE_LAG:
        q = tl.load(of_query, mask=here, other=0.0)
    for r in range(count):
        age = tl.load(of_ages + r * a_d).to(tl.int64)
        place = of_store + (added - age) % capacity
        if not ONE_LAG:
            lag = tl.load(of_lags + r * g_d).to(tl.int64)
            q = tl.load(of_query + (lag - 1) * q_s, mask=here, other=0.0)
        k = tl.load(Keys + place * k_n + in_block, mask=token_ok[:, None] & d_ok[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(token_ok[None, :], scores * LOG2_E, float("-inf"))
        largest = tl.max(scores, axis=1)
        score = (largest + tl.log2(tl.sum(tl.exp2(scores - largest[:, None]), axis=1))) / LOG2_E
        landmark = tl.load(Landmarks + place * l_n + d * l_d, mask=d_ok, other=0.0)
        score += tl.sum(q.to(tl.float32) * landmark.to(tl.float32)[None, :], axis=1)
        tl.store(of_scores + r, score, mask=row_ok)
