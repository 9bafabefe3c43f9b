"""Functions of one tile, shared by the Triton kernels: find, load and store its rows; softmax within its blocks.

A tile of keys holds GROUP blocks, each in SEGMENT ≥ W = ℓ+1 columns. So sum and maximum of a block are reductions over
a segment of the scores (M, GROUP, SEGMENT). Scores are not scaled; gates and log-sum-exps are scaled, in units of
log 2.
"""

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl


@triton.jit
def find_tile(program, batch, Phase, Starts, samples, rows, STEP, OF_BLOCKS: tl.constexpr, PACKED: tl.constexpr):
    """The sample of this program: its number, first row, length, phase, the program's tile in it, its number of tiles.

    STEP: rows of a tile; with OF_BLOCKS, positions of a tile, which begins with a whole block. PACKED: the samples
    follow one another in `rows` rows, sample i from row Starts[i] on; else each element of the batch is one sample.
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
    """A tile of queries. For each query (M,): offset in the tile, row, whether the row exists, its key, its own block.

    Then the first and the last of these blocks.
    """
    offset = tl.arange(0, M)
    row = tile * M + offset
    rows_key = prefix + row
    first = (phase + prefix + tile * M) // W
    last = (phase + prefix + tl.minimum(tile * M + M, queries) - 1) // W
    return offset, row, row < queries, rows_key, (phase + rows_key) // W, first, last


@triton.jit
def key_columns(
    tile, phase, length, W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, EDGE: tl.constexpr = True
):
    """A tile of keys: its first key, and for each column the distance from that key and whether there is a key.

    EDGE: whether the tile may reach beyond the window.
    """
    column = tl.arange(0, GROUP * SEGMENT)
    offset = column % SEGMENT
    start = tile * GROUP * W - phase
    place = column // SEGMENT * W + offset
    valid = offset < W
    if EDGE:
        valid = valid & (start + place >= 0) & (start + place < length)
    return start, place, valid


@triton.jit
def masked_tiles(first, last, GROUP: tl.constexpr):
    """How tiles of GROUP blocks cover the keys of a tile of queries. first, last: blocks of these queries.

    The tiles 1 … end−1 hold complete blocks that are earlier than all queries, and need no mask. The others are tile 0,
    where the window may begin, and those from `end` on. Returns end and the number of tiles with a mask: the first of
    them is tile 0, number n > 0 is tile n + end − 1.
    """
    end = tl.maximum(first // GROUP, 1)
    return end, last // GROUP + 2 - end


@triton.jit
def _matrix(base, start, place, valid, stride, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to the rows start + place of a matrix, and the mask of the numbers that exist."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + (tl.full((), 0, tl.int64) + start) * stride + (place[:, None] * stride + d[None, :] * stride_d)
    mask = valid[:, None]
    if D < BLOCK_D:
        mask = mask & (d[None, :] < D)
    return pointers, mask


@triton.jit
def load_rows(base, start, place, valid, stride, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows start + place of a matrix, (places, BLOCK_D), 0 where a row is not valid."""
    pointers, mask = _matrix(base, start, place, valid, stride, stride_d, D, BLOCK_D)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, start, place, valid, stride, stride_d, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write x (places, BLOCK_D) to the rows start + place of a matrix, where valid."""
    pointers, mask = _matrix(base, start, place, valid, stride, stride_d, D, BLOCK_D)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(base, start, place, valid, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add x (places, BLOCK_D) to the rows start + place of a matrix (rows, D) of sums, where valid."""
    pointers, mask = _matrix(base, start, place, valid, D, 1, D, BLOCK_D)
    tl.atomic_add(pointers, x, mask=mask, sem="relaxed")


@triton.jit
def load_controlled(base, tile, blocks, GROUP: tl.constexpr, CMT: tl.constexpr):
    """For each block of a tile of keys (GROUP,): not 0 where the context miss token controls its landmark."""
    block = tile * GROUP + tl.arange(0, GROUP)
    controlled = block * 0
    if CMT:
        controlled = tl.load(base + block, mask=block < blocks, other=0).to(tl.int32)
    return controlled


@triton.jit
def softmax_in_blocks(
    scores, rows_key, own, tile, phase, length, scale,
    W: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, M: tl.constexpr, MIXED: tl.constexpr,
    ALPHA: tl.constexpr,
):  # fmt: skip
    """Softmax within the blocks of a tile of scores (M, columns).

    rows_key: (M,), the key of each query. own: (M,), its own block. MIXED: whether a block of the tile may be a query's
    own block or later, or incomplete; else all are earlier, and complete. ALPHA: how much of the log-sum-exp of its
    tokens' scores is added to the gate of an earlier block. Returns the exponentials (M, GROUP, SEGMENT); their sums,
    the gates, and whether the block is earlier than the query's own, each (M, GROUP); and whether a column is a
    landmark, (1, 1, SEGMENT).
    """
    scores = tl.reshape(scores, (M, GROUP, SEGMENT))
    offset = tl.arange(0, SEGMENT)[None, :]
    block = tile * GROUP + tl.arange(0, GROUP)[:, None]
    is_landmark = (offset == W - 1)[None, :, :]
    gate = tl.sum(tl.where(is_landmark, scores, -0.0), axis=2) * scale  # compilers leave out x + (−0), but not x + 0
    is_token = offset < W - 1
    if MIXED:
        key = block * W + offset - phase
        visible = (is_token & (key >= 0) & (key < length))[None, :, :]
        visible = visible & (key[None, :, :] <= rows_key[:, None, None])
    else:
        visible = is_token[None, :, :]
    scores = tl.where(visible, scores, float("-inf"))
    block = tile * GROUP + tl.arange(0, GROUP)[None, :]
    earlier = block < own[:, None]
    largest = tl.max(scores, axis=2)
    if MIXED:
        largest = tl.where(largest == float("-inf"), 0.0, largest)
    largest = largest * scale
    exponentials = tl.exp2(scores * scale - largest[:, :, None])
    total = tl.sum(exponentials, axis=2)
    if MIXED:
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
    if ALPHA != 0:
        gate += ALPHA * (largest + tl.log2(total))
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
    """Controlled landmarks of the blocks from `first` on.

    Returns their keys (LANDMARKS, BLOCK_D), and (M, LANDMARKS) whether one is controlled and the query sees it.
    """
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

    own: (M,), the block of each query. last: the last of these blocks.
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
