"""A token of a `BlockCache` on a GPU: its key and value are stored, it chooses blocks and reads, in six launches.

What changes from token to token, its position, is read on the device. So a CUDA graph may hold these kernels, and
nothing on the host waits for them. Their plain twins are `BlockCache`'s `write`, and `_read_one` and `read_all` in
attention.py; shapes and names are those of that file.
"""

# Triton's language only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded
from landmark.memory.blocks.attention import AttentionConfig, Text
from landmark.memory.blocks.prefill_kernels import lag_of, list_of, scaled_scores, turned
from landmark.memory.splits import merge_constants, merged_splits, splits_of

BLOCKS = 64  # whose means a program scores


@triton.jit
def append(
    K, V, Keys, Values, Means, Position, k_b, k_h, v_b, v_h, c_c, c_t, w_c, w_t, m_c, m_t, heads,
    L: tl.constexpr, SEGMENT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a key and a value of each cache, and the mean of the keys of a block that they complete."""
    cache, position = tl.program_id(0).to(tl.int64), tl.load(Position)
    batch, head = cache // heads, cache % heads
    d, offset = tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    d_ok = d < D
    k = tl.load(K + batch * k_b + head * k_h + d, mask=d_ok, other=0.0)
    v = tl.load(V + batch * v_b + head * v_h + d, mask=d_ok, other=0.0)
    tl.store(Keys + cache * c_c + position * c_t + d, k, mask=d_ok)
    tl.store(Values + cache * w_c + position * w_t + d, v, mask=d_ok)
    if position % L == L - 1:
        block = position // L
        at = Keys + cache * c_c + (block * L + offset)[:, None] * c_t + d[None, :]
        before = tl.load(at, mask=(offset < L - 1)[:, None] & d_ok[None, :], other=0.0)
        mean = (tl.sum(before.to(tl.float32), axis=0) + k.to(tl.float32)) / L
        tl.store(Means + cache * m_c + block * m_t + d, mean, mask=d_ok)


@triton.jit
def _far(position, WINDOW: tl.constexpr, L: tl.constexpr):
    """Blocks before the window of the query at a position."""
    return tl.maximum(0, position // L * L - WINDOW) // L


@triton.jit(do_not_specialize=["blocks", "parts"])
def scores_of_means(
    Q, Means, Placed, Turns, Position, Scores, Lse, q_b, q_h, m_c, m_t, heads, blocks, parts, scale, softcap,
    GROUP: tl.constexpr, NEWEST: tl.constexpr, WINDOW: tl.constexpr, L: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Scores (C, GROUP, blocks) of a group's queries and some means, and their log-sum-exp (C, GROUP, parts).

    Both are for powers of 2. PAIRS: of channels that turn, where blocks older than the last NEWEST are scored as
    `Placed`; 0: all have their means.
    """
    part, cache = tl.program_id(0), tl.program_id(1).to(tl.int64)
    far = _far(tl.load(Position), WINDOW, L)
    d, block = tl.arange(0, BLOCK_D), part * BLOCKS + tl.arange(0, BLOCKS)
    d_ok, seen, older = d < D, block < far, block < far - NEWEST
    at = cache * m_c + block.to(tl.int64)[:, None] * m_t + d[None, :]
    if PAIRS:
        means = tl.load(Means + at, mask=(seen & (block >= far - NEWEST))[:, None] & d_ok[None, :], other=0.0)
        means += tl.load(Placed + at, mask=older[:, None] & d_ok[None, :], other=0.0)
    else:
        means = tl.load(Means + at, mask=seen[:, None] & d_ok[None, :], other=0.0)
    for row in range(GROUP):
        query_base = cache // heads * q_b + (cache % heads * GROUP + row) * q_h
        q = tl.load(Q + query_base + d, mask=d_ok, other=0.0).to(tl.float32)
        scores = tl.sum(means * q[None, :], axis=1)
        if PAIRS:
            q = turned(Q, Turns, query_base + d, d, d_ok, far, -1, PAIRS)
            scores = tl.where(older, tl.sum(means * q[None, :], axis=1), scores)
        scores = tl.where(seen, scaled_scores(scores, scale, softcap, CAPPED), float("-inf"))
        largest = tl.max(scores, axis=0)
        level = tl.where(largest == float("-inf"), 0.0, largest)
        row_index = cache * GROUP + row
        tl.store(Scores + row_index * blocks + block, scores, mask=block < blocks)
        tl.store(Lse + row_index * parts + part, level + tl.log2(tl.sum(tl.exp2(scores - level), axis=0)))


@triton.jit(do_not_specialize=["blocks", "parts"])
def largest_shares(
    Scores, Lse, Position, Shares, blocks, parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    L: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The largest share (C, blocks) that a query of the group gives a block; of the FIRST ones infinite."""
    part, cache = tl.program_id(0), tl.program_id(1).to(tl.int64)
    far = _far(tl.load(Position), WINDOW, L)
    row, each, block = tl.arange(0, ROWS), tl.arange(0, LISTED), part * BLOCKS + tl.arange(0, BLOCKS)
    row_ok, group_row = row < GROUP, cache * GROUP + row
    lse = tl.load(
        Lse + group_row[:, None] * parts + each[None, :],
        mask=row_ok[:, None] & (each < parts)[None, :],
        other=float("-inf"),
    )
    largest = tl.max(lse, axis=1)
    level = tl.where(largest == float("-inf"), 0.0, largest)
    normaliser = level + tl.log2(tl.sum(tl.exp2(lse - level[:, None]), axis=1))
    seen = row_ok[:, None] & (block < far)[None, :]
    scores = tl.load(Scores + group_row[:, None] * blocks + block[None, :], mask=seen, other=float("-inf"))
    shares = tl.max(tl.where(seen, tl.exp2(scores - normaliser[:, None]), 0.0), axis=0)
    shares = tl.where(block < FIRST, float("inf"), shares)
    tl.store(Shares + cache * blocks + block, tl.where(block < far, shares, -1.0), mask=block < blocks)


@triton.jit(do_not_specialize=["count", "splits"])
def read_keys(
    Q, Keys, Values, Chosen, Turns, Position, Parts, Lse, q_b, q_h, c_c, c_t, w_c, w_t, heads, count, splits,
    scale, softcap, GROUP: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr, WINDOW: tl.constexpr,
    L: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr, PAIRS: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Attention of a group's queries to a part of what they read: chosen blocks (C, count), and the last tokens.

    ALL: all keys are read, and `count` is 0. PAIRS: as above, for chosen blocks, which get the `count` + 1 places
    before the window. Parts: (splits, C, GROUP, D), Lse: (splits, C, GROUP), in units of log 2, float32.
    """
    split, cache = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(Position)
    far = _far(position, WINDOW, L)
    row, d, offset = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SEGMENT)
    row_ok, d_ok = row < GROUP, d < D
    row_index = cache // heads * q_b + (cache % heads * GROUP + row) * q_h
    here, at_q = row_ok[:, None] & d_ok[None, :], row_index[:, None] + d[None, :]
    q = tl.load(Q + at_q, mask=here, other=0.0)
    running = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    near = 0 if ALL else far * L
    steps = count + tl.cdiv(position + 1 - near, SEGMENT)
    each = tl.cdiv(steps, splits)
    if PAIRS:
        listed = list_of(Chosen + cache * count, count, LISTED)
    for j in range(split * each, tl.minimum(split * each + each, steps)):
        queries = q
        if j < count:
            block = tl.load(Chosen + cache * count + j).to(tl.int64)
            at, key_ok = block * L + offset, offset < L
            if PAIRS:
                moved = far - block - lag_of(block, listed, far, count)
                queries = turned(Q, Turns, at_q, d[None, :], here, moved, -1, PAIRS).to(q.dtype)
        else:
            at = near + (j - count) * SEGMENT + offset
            key_ok = at <= position
        token = key_ok[:, None] & d_ok[None, :]
        k = tl.load(Keys + cache * c_c + at[:, None] * c_t + d[None, :], mask=token, other=0.0)
        v = tl.load(Values + cache * w_c + at[:, None] * w_t + d[None, :], mask=token, other=0.0)
        products = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(key_ok[None, :], scaled_scores(products, scale, softcap, CAPPED), float("-inf"))
        larger = tl.maximum(running, tl.max(scores, axis=1))
        weights, kept = tl.exp2(scores - larger[:, None]), tl.exp2(running - larger)
        total = total * kept + tl.sum(weights, axis=1)
        acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        running = larger
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    group_row = (split.to(tl.int64) * tl.num_programs(1) + cache) * GROUP + row
    tl.store(Parts + group_row[:, None] * D + d[None, :], acc / total[:, None], mask=here)
    tl.store(Lse + group_row, tl.where(nothing, float("-inf"), running + tl.log2(total)), mask=row_ok)


KERNELS = append, scores_of_means, largest_shares, read_keys


def store(k: Tensor, v: Tensor, text: Text, position: Tensor, config: AttentionConfig) -> None:
    """Write keys and values (B, H_kv, 1, d) to the text, and the mean of a block that is complete with them.

    position: (), int64, on the device. The numbers of a head lie side by side, here and below.
    """
    strides = [x.stride(n) for x in (k, v, *text[:3]) for n in (0, 1)]
    _launch(
        append, (len(text.keys),), k, v, *text[:3], position, *strides, k.shape[1], **constants(1, k.shape[3], config)
    )


def choose(q: Tensor, text: Text, position: Tensor, config: AttentionConfig) -> Tensor:
    """The blocks (C, k), in no order, that a token chooses; more than k must be far.

    q: (B, H, 1, d).
    """
    caches, blocks = text.summaries.shape[:2]
    group, parts = q.shape[0] * q.shape[1] // caches, -(-blocks // BLOCKS)
    scores, lse, shares = (
        q.new_empty(shape, dtype=torch.float32)
        for shape in ((caches, group, blocks), (caches, group, parts), (caches, blocks))
    )
    rotated, factors = (text.summaries, scores) if text.factors is None else (text.rotated, text.factors)
    sizes, grid = constants(group, q.shape[3], config, text.factors, parts), (parts, caches)
    strides = *q.stride()[:2], *text.summaries.stride()[:2]
    scoring = caches // len(q), blocks, parts, config.scale, config.softcap or 0.0
    given = q, text.summaries, rotated, factors, position, scores, lse
    _launch(scores_of_means, grid, *given, *strides, *scoring, **sizes)
    _launch(largest_shares, grid, scores, lse, position, shares, blocks, parts, **sizes)
    return shares.topk(config.k, sorted=False).indices


def read(
    q: Tensor, text: Text, position: Tensor, chosen: Tensor | None, config: AttentionConfig
) -> tuple[Tensor, Tensor]:
    """Attention (B, H, 1, d) of a token to the blocks that it chose, and to its last tokens; or to all keys.

    q: (B, H, 1, d). chosen: (C, k); None: all keys are read. Returns also log-sum-exps (splits, B·H), in units of
    log 2, whose log-sum-exp is that of all that is read.
    """
    (caches, capacity), group = text.keys.shape[:2], q.shape[0] * q.shape[1] // len(text.keys)
    steps, count, listed = -(-capacity // padded(config.block_size)), 0, position
    factors = None
    if chosen is not None:
        count, listed, factors = chosen.shape[1], chosen, text.factors
        steps = count + config.window // config.block_size + 1
    splits = splits_of(steps, caches, q.device)
    parts = q.new_empty(splits, caches * group, q.shape[3], dtype=torch.float32)
    lse, out = parts.new_empty(parts.shape[:2]), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    given = q, *text[:2], listed, lse if factors is None else factors, position, parts, lse
    strides = *q.stride()[:2], *text.keys.stride()[:2], *text.values.stride()[:2]
    scoring = caches // len(q), count, splits, config.scale, config.softcap or 0.0
    sizes = constants(group, q.shape[3], config, factors, count, exact=q.dtype == torch.float32)
    sizes |= {"ALL": chosen is None}
    _launch(read_keys, (splits, caches), *given, *strides, *scoring, **sizes)
    merging, rows = merge_constants(q.shape[3]) | {"WEIGHTED": False, "MASKED": False, "SPLITS": splits}, caches * group
    _launch(merged_splits, (-(-rows // merging["M"]),), parts, lse, out, out, out, rows, **merging)
    return out, lse


def constants(
    group: int, dim: int, config: AttentionConfig, factors: Tensor | None = None, listed: int = 1, exact: bool = False
) -> dict[str, Any]:
    """Compile-time constants of the kernels, whose names tell them apart.

    group: heads that share keys. dim: d. listed: blocks, or parts of all blocks, that a program loads the list of.
    exact: whether products are in float32.
    """
    sizes = {"GROUP": group, "ROWS": padded(group), "D": dim, "BLOCK_D": padded(dim), "BLOCKS": BLOCKS}
    sizes |= {
        "L": config.block_size,
        "SEGMENT": padded(config.block_size),
        "WINDOW": config.window,
        "FIRST": config.sinks,
    }
    sizes |= {
        "NEWEST": config.k,
        "PAIRS": 0 if factors is None else factors.shape[1],
        "CAPPED": config.softcap is not None,
    }
    sizes["LISTED"] = triton.next_power_of_2(max(1, listed))
    return sizes | {
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 8 if dim > 128 else 4,
        "num_stages": 1 if dim > 128 else 2,
    }


def _launch(kernel: Any, grid: tuple[int, ...], q: Tensor, *arguments: Any, **sizes: Any) -> None:
    """Launch a kernel with those of the constants that it has."""
    names = {*kernel.arg_names, "num_warps", "num_stages"}
    with on_device_of(q):
        kernel[grid](q, *arguments, **{name: size for name, size in sizes.items() if name in names})
