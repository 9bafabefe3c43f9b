"""The kernels of attention.py for tiles on a GPU, in half precision.

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
from landmark.memory.blocks.attention import AttentionConfig, Text, constant, highest
from landmark.utils import constants

LOG2_E: tl.constexpr = tl.constexpr(constants.LOG2_E)
LEAST = 16  # rows, keys and numbers of a head that `tl.dot` needs
MEANS = 64  # of one step


@triton.jit
def scaled_scores(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores of products of queries and keys, for powers of 2."""
    scores = products * scale
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores * LOG2_E


@triton.jit
def _scores(q, k, scale, softcap, CAPPED: tl.constexpr):
    return scaled_scores(tl.dot(q, tl.trans(k)), scale, softcap, CAPPED)


@triton.jit
def turned(X, Turns, at, d, mask, blocks, LATER: tl.constexpr, PAIRS: tl.constexpr):
    """Keys or queries in float32, as if they stood so many blocks later (1) or earlier (-1) in the text.

    Turns: (blocks, PAIRS, 2). at: of the numbers, in the shape of d.
    """
    factors, pair_base = d < 2 * PAIRS, Turns + (blocks * PAIRS + d % PAIRS) * 2
    partner = tl.where(factors, tl.where(d < PAIRS, PAIRS, -PAIRS), 0)
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(X + at + partner, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(pair_base, mask=factors, other=1.0)
    sin = tl.load(pair_base + 1, mask=factors, other=0.0)
    return x * cos + other * tl.where(d < PAIRS, -LATER * sin, LATER * sin)


@triton.jit
def _mean_key_scores(
    q, older_q, Means, Placed, j, offset, d, k_c, far, newest, scale, softcap,
    SEGMENT: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Scores of SEGMENT blocks; with PAIRS those older than the `newest` are scored as Placed."""
    block = j * SEGMENT + offset
    at, d_ok = k_c + block[:, None] * D + d[None, :], (d < D)[None, :]
    newer = (block < far) & (block >= far - newest) if PAIRS else block < far
    scores = _scores(q, tl.load(Means + at, mask=newer[:, None] & d_ok, other=0.0), scale, softcap, CAPPED)
    if PAIRS:
        older = tl.load(Placed + at, mask=(block < far - newest)[:, None] & d_ok, other=0.0)
        older_scores = _scores(older_q, older, scale, softcap, CAPPED)
        scores = tl.where((block < far - newest)[None, :], older_scores, scores)
    return scores, block < far


@triton.jit(do_not_specialize=["count", "rows", "before", "end"])
def block_shares(
    Q, MeanKeys, PlacedKeys, Turns, Far, Shares, count, rows, before, end, newest, scale, softcap,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    CAPPED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The largest share that one of a tile's rows gives each block, in a softmax over the blocks' means (C, count, D).

    Far: (n,), blocks that a tile sees. Rows of queries before `before`, or from `end` on, do not count. Shares: (C, n,
    count), -1, which stays where a block is not seen. PAIRS: of channels that turn; 0: keys are not moved.
    """
    tile, part, cache = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, d, offset = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    d_ok, far, tile_index = d < D, tl.load(Far + tile), cache * tl.num_programs(0) + tile
    query = tile * TILE + row % TILE
    asks = (row < rows) & (query >= before) & (query < end)
    here, asked = (tile_index * rows + row)[:, None] * D + d[None, :], asks[:, None] & d_ok[None, :]
    q = tl.load(Q + here, mask=asked, other=0.0)
    older_q = q
    if PAIRS:
        older_q = turned(Q, Turns, here, d[None, :], asked, far, -1, PAIRS).to(q.dtype)
    cache_base = cache * count * D
    running = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for j in range(tl.cdiv(far, SEGMENT)):
        scores, seen = _mean_key_scores(
            q, older_q, MeanKeys, PlacedKeys, j, offset, d, cache_base, far, newest, scale, softcap,
            SEGMENT, D, CAPPED, PAIRS,
        )  # fmt: skip
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(running, tl.max(scores, axis=1))
        total = total * tl.exp2(running - larger) + tl.sum(tl.exp2(scores - larger[:, None]), axis=1)
        running = larger
    normaliser = running + tl.log2(total)
    for j in range(tl.cdiv(far, SEGMENT)):
        scores, seen = _mean_key_scores(
            q, older_q, MeanKeys, PlacedKeys, j, offset, d, cache_base, far, newest, scale, softcap,
            SEGMENT, D, CAPPED, PAIRS,
        )  # fmt: skip
        shares = tl.where(seen[None, :] & asks[:, None], tl.exp2(scores - normaliser[:, None]), 0.0)
        tl.atomic_max(Shares + tile_index * count + j * SEGMENT + offset, tl.max(shares, axis=0), mask=seen)


@triton.jit
def list_of(Chosen, count, LISTED: tl.constexpr):
    """The chosen blocks, and behind them numbers that no block has."""
    place = tl.arange(0, LISTED)
    return tl.load(Chosen + place, mask=place < count, other=1 << 40)


@triton.jit
def lag_of(block, listed, far, count):
    """The place of a chosen block, in blocks before the window: 1 is the nearest. far: blocks before the window."""
    rank = tl.sum((listed < block).to(tl.int64), axis=0)
    return count - rank + tl.where(far - block > count, 1, 0)


@triton.jit(do_not_specialize=["count", "rows", "start"])
def read_blocks(
    Q, Keys, Values, Chosen, Turns, Out, Lse, k_c, k_t, v_c, v_t, count, rows, start, scale, softcap,
    TILE: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CAPPED: tl.constexpr, PAIRS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's rows to its chosen blocks (C, n, count), to the window before its group, and to its group.

    With PAIRS the chosen blocks are moved to the `count` + 1 places before the window. Out: (C, n, rows, D). Lse: (C,
    n, rows), float32.
    """
    tile, part, cache = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile_index = cache * tl.num_programs(0) + tile
    row, d, offset = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    row_ok, d_ok = row < rows, d < D
    here = (tile_index * rows + row)[:, None] * D + d[None, :]
    q = tl.load(Q + here, mask=row_ok[:, None] & d_ok[None, :], other=0.0)
    keys_base, values_base = Keys + cache * k_c, Values + cache * v_c
    running = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    first = start + tile * TILE
    position = first + row % TILE
    near = first // GROUP * GROUP - WINDOW
    steps = count + tl.cdiv(first + TILE - near, SEGMENT)
    if PAIRS:
        listed = list_of(Chosen + tile_index * count, count, LISTED)
    for j in range(steps):
        moved = first * 0  # blocks
        if j < count:
            block = tl.load(Chosen + tile_index * count + j).to(tl.int64)
            if PAIRS:
                moved = near // L - block - lag_of(block, listed, near // L, count)
            at = block * L + offset
            key_ok, seen = offset < L, row_ok[:, None] & (offset < L)[None, :]
        else:
            at = near + (j - count) * SEGMENT + offset
            key_ok, seen = at < first + TILE, at[None, :] <= position[:, None]
        key_here = key_ok[:, None] & d_ok[None, :]
        v = tl.load(values_base + at[:, None] * v_t + d[None, :], mask=key_here, other=0.0)
        if PAIRS:
            k = turned(keys_base, Turns, at[:, None] * k_t + d[None, :], d[None, :], key_here, moved, 1, PAIRS)
            k = k.to(v.dtype)
        else:
            k = tl.load(keys_base + at[:, None] * k_t + d[None, :], mask=key_here, other=0.0)
        scores = tl.where(seen, _scores(q, k, scale, softcap, CAPPED), float("-inf"))
        larger = tl.maximum(running, tl.max(scores, axis=1))
        level = tl.where(larger == float("-inf"), 0.0, larger)
        weights, kept = tl.exp2(scores - level[:, None]), tl.exp2(running - level)
        total = total * kept + tl.sum(weights, axis=1)
        acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v)
        running = larger
    tl.store(Out + here, (acc / total[:, None]).to(Out.dtype.element_ty), mask=row_ok[:, None] & d_ok[None, :])
    tl.store(Lse + tile_index * rows + row, (running + tl.log2(total)) / LOG2_E, mask=row_ok)


def read_tiles(
    rows: Tensor,
    _: Tensor,
    text: Text,
    start: int,
    far: tuple[int, ...],
    asking: tuple[int, int],
    config: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """As attention.py has it."""
    rows = rows.contiguous()
    found = shares(rows, text, far, asking, config)
    found[..., : config.sinks].fill_(torch.inf)
    chosen = highest(found, None, config.k)
    return *read(rows, text, chosen, start, config), chosen


def shares(q: Tensor, text: Text, far: tuple[int, ...], asking: tuple[int, int], config: AttentionConfig) -> Tensor:
    """The largest share of each block among the rows of its tile, (C, n, blocks), float32; -1 where it is not seen.

    q: (C, n, G·τ, d), contiguous. far, asking: as of `read_tiles`.
    """
    out = q.new_full((len(q), q.shape[1], far[-1]), -1, dtype=torch.float32)
    kinds = [x for x in (text.summaries, text.rotated) if x is not None]
    means = [_computable(x[:, : far[-1]].to(q.dtype)).contiguous() for x in kinds]
    q, options = _computable(q), tile_constants(q.shape[2], q.shape[3], MEANS, text.factors)
    with on_device_of(q):
        block_shares[(q.shape[1], -(-q.shape[2] // options["ROWS"]), len(q))](  # tiles, parts of their rows, caches
            *(q, means[0], means[-1], out if text.factors is None else text.factors, constant(far, q.device), out),
            *(far[-1], q.shape[2], *asking, config.k, config.scale, config.softcap or 0.0),
            **options,
            **{"TILE": config.tile, "CAPPED": config.softcap is not None},
        )
    return out


def read(q: Tensor, text: Text, chosen: Tensor, start: int, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Attention of tiles q (C, n, G·τ, d), contiguous, to all that they read, and its log-sum-exp, float32.

    chosen: (C, n, k), blocks. start: position of the first tile's first query.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    q, keys, values = (_computable(x) for x in (q, text.keys, text.values))
    options = tile_constants(q.shape[2], q.shape[3], config.block_size, text.factors)
    with on_device_of(q):
        read_blocks[(q.shape[1], -(-q.shape[2] // options["ROWS"]), len(q))](
            *(q, keys, values, chosen.contiguous(), lse if text.factors is None else text.factors, out, lse),
            *(*keys.stride()[:2], *values.stride()[:2]),
            *(chosen.shape[2], q.shape[2], start, config.scale, config.softcap or 0.0),
            **options,
            **{"TILE": config.tile, "GROUP": config.group, "WINDOW": config.window, "L": config.block_size},
            **{"CAPPED": config.softcap is not None, "LISTED": triton.next_power_of_2(chosen.shape[2])},
        )
    return out, lse


def _computable(x: Tensor) -> Tensor:
    """The tensor in a type that the interpreter supports."""
    return x.float() if is_interpreted() and x.dtype == torch.bfloat16 else x


def tile_constants(rows: int, dim: int, keys: int, factors: Tensor | None) -> dict[str, int]:
    """Compile-time constants for tiles of so many rows and heads of `dim` numbers. keys: read in one step."""
    pairs, wide = 0 if factors is None else factors.shape[1], dim > 128
    part = max(LEAST, min((32 if pairs else 64) if wide else 128, triton.next_power_of_2(rows)))
    options = {"num_warps": 8 if part * dim > 64 * 64 else 4, "num_stages": 2 if pairs and wide else 3}
    return {"D": dim, "BLOCK_D": padded(dim), "ROWS": part, "SEGMENT": padded(keys), "PAIRS": pairs} | options
