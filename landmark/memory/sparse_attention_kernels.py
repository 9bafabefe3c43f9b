"""The kernels of sparse_attention.py for tiles on a GPU, in half precision.

Blocks are read where they are stored, and no table of queries and keys is written. The plain twin of `read_tiles` is
the function of this name there.

A program has ROWS of the G·τ rows of one tile; row r is query r mod τ. Both kernels get the rows (C, n, G·τ, d) of n
tiles.
"""

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import is_interpreted, on_device_of, padded
from landmark.memory.sparse_attention import Reading, Text, constant, highest
from landmark.utils import constants

LOG2_E: tl.constexpr = tl.constexpr(constants.LOG2_E)
LEAST = 16  # rows, keys and numbers of a head that `tl.dot` needs


@triton.jit
def _scores(q, k, scale, softcap, CAPPED: tl.constexpr):
    """Scores of rows and keys, for powers of 2."""
    scores = tl.dot(q, tl.trans(k)) * scale
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores * LOG2_E


@triton.jit(do_not_specialize=["count", "rows", "before", "end"])
def block_shares(
    Q, Keys, Listed, Far, Shares, k_c, k_t, count, rows, before, end, scale, softcap,
    TILE: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The largest share that one of a tile's rows gives each block, in a softmax over all of them.

    LISTED: blocks of L keys whose numbers are listed (C, n, count); else each of the first keys is a block. Far: (n,),
    blocks that a tile sees. Rows of queries before `before`, or from `end` on, do not count. Shares: (C, n, count), -1,
    which stays where a block is not seen.
    """
    tile, part, cache = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles = tl.num_programs(0)
    row, d, offset = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    d_ok = d < D
    far = tl.load(Far + tile)
    of_tile = cache * tiles + tile
    query = tile * TILE + row % TILE
    asks = (row < rows) & (query >= before) & (query < end)
    q = tl.load(Q + (of_tile * rows + row)[:, None] * D + d[None, :], mask=asks[:, None] & d_ok[None, :], other=0.0)
    of_cache = Keys + cache * k_c
    at = offset[:, None] * k_t + d[None, :]
    running = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    steps = count
    if not LISTED:
        steps = tl.cdiv(far, SEGMENT)
    for j in range(steps):
        if LISTED:
            block = tl.load(Listed + of_tile * count + j).to(tl.int64)
            first, key_ok = block * L, offset < tl.where(block < far, L, 0)
        else:
            first, key_ok = j * SEGMENT, j * SEGMENT + offset < far
        k = tl.load(of_cache + first * k_t + at, mask=key_ok[:, None] & d_ok[None, :], other=0.0)
        scores = _scores(q, k, scale, softcap, CAPPED)
        scores = tl.where(key_ok[None, :], scores, float("-inf"))
        larger = tl.maximum(running, tl.max(scores, axis=1))
        level = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(running - level) + tl.sum(tl.exp2(scores - level[:, None]), axis=1)
        running = larger
    normaliser = running + tl.log2(total)
    for j in range(steps):
        if LISTED:
            block = tl.load(Listed + of_tile * count + j).to(tl.int64)
            first, key_ok = block * L, offset < tl.where(block < far, L, 0)
        else:
            first, key_ok = j * SEGMENT, j * SEGMENT + offset < far
        k = tl.load(of_cache + first * k_t + at, mask=key_ok[:, None] & d_ok[None, :], other=0.0)
        scores = _scores(q, k, scale, softcap, CAPPED)
        shares = tl.where(key_ok[None, :] & asks[:, None], tl.exp2(scores - normaliser[:, None]), 0.0)
        if LISTED:
            tl.atomic_max(Shares + of_tile * count + j, tl.max(tl.sum(shares, axis=1), axis=0), mask=block < far)
        else:
            tl.atomic_max(Shares + of_tile * count + j * SEGMENT + offset, tl.max(shares, axis=0), mask=key_ok)


@triton.jit(do_not_specialize=["count", "rows", "start"])
def read_blocks(
    Q, Keys, Values, Chosen, Out, Lse, k_c, k_t, v_c, v_t, count, rows, start, scale, softcap,
    TILE: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's rows to its chosen blocks (C, n, count), to the window before its group, and to its group.

    Out: (C, n, rows, D). Lse: (C, n, rows), float32.
    """
    tile, part, cache = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_tile = cache * tl.num_programs(0) + tile
    row, d, offset = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    row_ok, d_ok = row < rows, d < D
    here = (of_tile * rows + row)[:, None] * D + d[None, :]
    q = tl.load(Q + here, mask=row_ok[:, None] & d_ok[None, :], other=0.0)
    of_keys, of_values = Keys + cache * k_c, Values + cache * v_c
    running = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    first = start + tile * TILE
    position = first + row % TILE
    near = first // GROUP * GROUP - WINDOW
    steps = count + tl.cdiv(first + TILE - near, SEGMENT)
    for j in range(steps):
        if j < count:
            at = tl.load(Chosen + of_tile * count + j).to(tl.int64) * L + offset
            key_ok, seen = offset < L, row_ok[:, None] & (offset < L)[None, :]
        else:
            at = near + (j - count) * SEGMENT + offset
            key_ok, seen = at < first + TILE, at[None, :] <= position[:, None]
        key_here = key_ok[:, None] & d_ok[None, :]
        k = tl.load(of_keys + at[:, None] * k_t + d[None, :], mask=key_here, other=0.0)
        v = tl.load(of_values + at[:, None] * v_t + d[None, :], mask=key_here, other=0.0)
        scores = tl.where(seen, _scores(q, k, scale, softcap, CAPPED), float("-inf"))
        larger = tl.maximum(running, tl.max(scores, axis=1))
        level = tl.where(larger == float("-inf"), 0.0, larger)
        weights, kept = tl.exp2(scores - level[:, None]), tl.exp2(running - level)
        total = total * kept + tl.sum(weights, axis=1)
        acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v)
        running = larger
    tl.store(Out + here, (acc / total[:, None]).to(Out.dtype.element_ty), mask=row_ok[:, None] & d_ok[None, :])
    tl.store(Lse + of_tile * rows + row, (running + tl.log2(total)) / LOG2_E, mask=row_ok)


def read_tiles(
    rows: Tensor, _: Tensor, text: Text, start: int, far: tuple[int, ...], asking: tuple[int, int], how: Reading
) -> tuple[Tensor, Tensor, Tensor]:
    """As sparse_attention.py has it. Keys are not moved."""
    rows, behind = rows.contiguous(), constant(far, rows.device)
    found = shares(rows, text.means[:, : far[-1]].to(rows.dtype), behind, asking, None, how)
    found[..., : how.first].fill_(torch.inf)
    chosen = highest(found, None, how.proposed or how.k)
    if how.k < how.proposed and how.k < far[-1]:
        found = shares(rows, text.keys, behind, asking, chosen, how)
        found[..., : how.first].fill_(torch.inf)
        chosen = chosen.gather(-1, highest(found, None, how.k))
    return *read(rows, text, chosen, start, how), chosen


def shares(
    q: Tensor, keys: Tensor, far: Tensor, asking: tuple[int, int], listed: Tensor | None, how: Reading
) -> Tensor:
    """The largest share of each block among the rows of its tile, (C, n, m) or (C, n, blocks), float32; -1: not seen.

    q: (C, n, G·τ, d), contiguous. keys: (C, capacity, d), of tokens; or (C, blocks, d), one for each. far: (n,), blocks
    that each tile sees. asking: as of `read_tiles`. listed: (C, n, m), blocks of ℓ keys; None: each of the first keys
    is a block.
    """
    count = keys.shape[1] if listed is None else listed.shape[2]
    out = q.new_full((len(q), q.shape[1], count), -1, dtype=torch.float32)
    q, keys = _computable(q), _computable(keys)
    options = tile_constants(q.shape[2], q.shape[3], 64 if listed is None else how.block_size)
    with on_device_of(q):
        block_shares[(q.shape[1], -(-q.shape[2] // options["ROWS"]), len(q))](  # tiles, parts of their rows, caches
            *(q, keys, out if listed is None else listed.contiguous(), far, out),
            *(*keys.stride()[:2], count, q.shape[2], *asking, how.scale, how.softcap or 0.0),
            **options,
            **{"TILE": how.tile, "L": how.block_size, "LISTED": listed is not None, "CAPPED": how.softcap is not None},
        )
    return out


def read(q: Tensor, text: Text, chosen: Tensor, start: int, how: Reading) -> tuple[Tensor, Tensor]:
    """Attention of tiles q (C, n, G·τ, d), contiguous, to all that they read, and its log-sum-exp, float32.

    chosen: (C, n, k), blocks. start: position of the first tile's first query.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    q, keys, values = (_computable(x) for x in (q, text.keys, text.values))
    options = tile_constants(q.shape[2], q.shape[3], how.block_size)
    with on_device_of(q):
        read_blocks[(q.shape[1], -(-q.shape[2] // options["ROWS"]), len(q))](
            *(q, keys, values, chosen.contiguous(), out, lse, *keys.stride()[:2], *values.stride()[:2]),
            *(chosen.shape[2], q.shape[2], start, how.scale, how.softcap or 0.0),
            **options,
            **{"TILE": how.tile, "GROUP": how.group, "WINDOW": how.window, "L": how.block_size},
            CAPPED=how.softcap is not None,
        )
    return out, lse


def _computable(x: Tensor) -> Tensor:
    """The tensor in a type that the interpreter supports."""
    return x.float() if is_interpreted() and x.dtype == torch.bfloat16 else x


def tile_constants(rows: int, dim: int, keys: int) -> dict[str, int]:
    """Compile-time constants for tiles of so many rows and heads of `dim` numbers. keys: read in one step."""
    part = max(LEAST, min(64 if dim > 128 else 128, triton.next_power_of_2(rows)))
    warps = 8 if part * dim > 64 * 64 else 4
    return {"D": dim, "BLOCK_D": padded(dim), "ROWS": part, "SEGMENT": padded(keys), "num_warps": warps}
