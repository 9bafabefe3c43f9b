"""The parts of the Triton kernels that work on one tile: find, load and store its rows; softmax within its blocks.

A tile of keys holds GROUP blocks, each in SEGMENT ≥ W = ℓ+1 columns, so that a number of a block is a reduction over a
segment: scores (M, GROUP·SEGMENT) are seen as (M, GROUP, SEGMENT). Scores are not scaled; gates and log-sum-exps are
scaled, in units of log 2.
"""

from __future__ import annotations

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl


@triton.jit
def find_tile(program, batch, Phase, Starts, samples, rows, W, STEP, OF_BLOCKS: tl.constexpr, PACKED: tl.constexpr):
    """The sample, its first row, length and phase, the tile of it that this program computes, and its number of tiles.

    STEP: rows of a tile, or positions of a tile where OF_BLOCKS. PACKED: the samples follow one another in `rows` rows,
    sample i from Starts[i] on, and so do their tiles; else each element of the batch is one sample.
    """
    sample, start, length, tile = batch, 0, rows, program
    if PACKED:
        sample, before = 0, 0
        for at in range(0, samples, 128):
            i = at + tl.arange(0, 128)
            lengths = tl.load(Starts + i + 1, mask=i < samples, other=0) - tl.load(
                Starts + i, mask=i < samples, other=0
            )
            if OF_BLOCKS:
                lengths = tl.where(lengths > 0, lengths + tl.load(Phase + i, mask=i < samples, other=0), 0)
            ends = tl.cumsum((lengths + STEP - 1) // STEP, 0) + before
            sample += tl.sum(((ends <= program) & (i < samples)).to(tl.int32), 0)
            tile = tl.minimum(tile, program - tl.max(tl.where(ends <= program, ends, 0), 0))
            before = tl.max(ends, 0)
        known = sample < samples
        start = tl.load(Starts + sample, mask=known, other=0)
        length = tl.load(Starts + sample + 1, mask=known, other=0) - start
    phase = tl.load(Phase + sample, mask=sample < samples, other=0)
    tiles = tl.cdiv(length + phase, STEP) if OF_BLOCKS else tl.cdiv(length, STEP)
    return sample, start, length, phase, tile, tiles


@triton.jit
def query_rows(tile, phase, prefix, queries, M: tl.constexpr, W: tl.constexpr):
    """A tile of queries: offsets in the tile, rows, which of them exist, their keys and their own blocks, all (M,); and
    the first and last of these blocks."""
    offset = tl.arange(0, M)
    row = tile * M + offset
    rows_key = prefix + row
    first = (phase + prefix + tile * M) // W
    last = (phase + prefix + tl.minimum(tile * M + M, queries) - 1) // W
    return offset, row, row < queries, rows_key, (phase + rows_key) // W, first, last


@triton.jit
def key_columns(tile, phase, length, W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr):
    """A tile of keys: the first key, the distance of each column's key from it, and whether the column has a key."""
    column = tl.arange(0, GROUP * SEGMENT)
    offset = column % SEGMENT
    start = tile * GROUP * W - phase
    place = column // SEGMENT * W + offset
    return start, place, (offset < W) & (start + place >= 0) & (start + place < length)


@triton.jit
def _matrix(base, start, place, valid, stride, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to the rows start + place of a matrix, and which of the numbers exist."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + (tl.full((), 0, tl.int64) + start) * stride + (place[:, None] * stride + d[None, :] * stride_d)
    mask = valid[:, None]
    if D < BLOCK_D:
        mask = mask & (d[None, :] < D)
    return pointers, mask


@triton.jit
def load_rows(base, start, place, valid, stride, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows (rows, BLOCK_D) of a matrix, 0 where there is none."""
    pointers, mask = _matrix(base, start, place, valid, stride, stride_d, D, BLOCK_D)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, start, place, valid, stride, stride_d, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write rows x (places, BLOCK_D) of a matrix, those that are valid, their first D columns."""
    pointers, mask = _matrix(base, start, place, valid, stride, stride_d, D, BLOCK_D)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_controlled(base, tile, blocks, GROUP: tl.constexpr, CMT: tl.constexpr):
    """(GROUP,), not 0 where the context miss token controls the landmark of a block of this tile of keys."""
    block = tile * GROUP + tl.arange(0, GROUP)
    controlled = block * 0
    if CMT:
        controlled = tl.load(base + block, mask=block < blocks, other=0).to(tl.int32)
    return controlled


@triton.jit
def softmax_in_blocks(
    scores, rows_key, own, tile, phase, length, scale,
    W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, M: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Softmax within the blocks of a tile of scores (M, columns).

    rows_key: (M,), the key of each query. own: (M,), its own block. MIXED: some block of the tile is not earlier than
    the own blocks of all queries.

    Returns the exponentials (M, GROUP, SEGMENT); three (M, GROUP): their sums, the gates, and whether the block is
    earlier than the query's own; and whether a column is a landmark, (1, 1, SEGMENT).
    """
    scores = tl.reshape(scores, (M, GROUP, SEGMENT))
    offset = tl.arange(0, SEGMENT)[None, :]
    block = tile * GROUP + tl.arange(0, GROUP)[:, None]
    key = block * W + offset - phase
    is_token = (offset < W - 1) & (key >= 0) & (key < length)
    is_landmark = (offset == W - 1)[None, :, :]
    gate = tl.sum(tl.where(is_landmark, scores, 0.0), axis=2) * scale
    block = tile * GROUP + tl.arange(0, GROUP)[None, :]
    earlier = block < own[:, None]
    if MIXED:
        visible = is_token[None, :, :] & (key[None, :, :] <= rows_key[:, None, None])
        scores = tl.where(visible, scores, float("-inf"))
    else:
        scores = tl.where(is_token[None, :, :], scores, float("-inf"))
    largest = tl.max(scores, axis=2)
    largest = tl.where(largest == float("-inf"), 0.0, largest) * scale
    exponentials = tl.exp2(scores * scale - largest[:, :, None])
    total = tl.sum(exponentials, axis=2)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if MIXED:
        gate = tl.where(block == own[:, None], largest + tl.log2(total), gate)
        gate = tl.where(block <= own[:, None], gate, float("-inf"))
    gate = tl.where(empty, float("-inf"), gate)
    return exponentials, total, gate, earlier, is_landmark


@triton.jit
def controlled_landmarks(
    k_base, Controlled, first, own, phase, length, blocks, k_t, k_d,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, LANDMARKS: tl.constexpr,
):  # fmt: skip
    """Keys (LANDMARKS, BLOCK_D) of the landmarks of the blocks from `first` on, and (M, LANDMARKS), whether the context
    miss token controls the landmark and the query sees it."""
    number = tl.arange(0, LANDMARKS)
    block = first + number
    key = block * W + (W - 1) - phase
    controlled = tl.load(Controlled + block, mask=block < blocks, other=0) != 0
    controlled = controlled & (key > 0) & (key < length)  # at key 0 it closes an empty block
    landmarks = load_rows(k_base, first * W + (W - 1) - phase, number * W, controlled, k_t, k_d, D, BLOCK_D)
    return landmarks, controlled[None, :] & (block[None, :] < own[:, None])


@triton.jit
def logsumexp_of_controlled(
    q, k_base, Controlled, own, last, phase, length, blocks, scale, k_t, k_d,
    W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, LANDMARKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp (M,) of the controlled landmarks that each query sees, −∞ where it sees none.

    last: the last of the queries' own blocks.
    """
    largest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for first in range(0, last, LANDMARKS):
        landmarks, seen = controlled_landmarks(
            k_base, Controlled, first, own, phase, length, blocks, k_t, k_d, W, D, BLOCK_D, LANDMARKS
        )
        scores = tl.dot(q, tl.trans(landmarks), input_precision=PRECISION) * scale
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(largest - safe) + tl.sum(tl.exp2(scores - safe[:, None]), axis=1)
        largest = larger
    return tl.where(total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total)))
