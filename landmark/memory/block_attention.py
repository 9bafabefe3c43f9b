"""Attention of queries over the blocks they retrieved, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.flash import attention_forward
from landmark.attention.fused_memory import attend_to_blocks
from landmark.memory.block_store import BlockStore

TILES = 1, 2, 4, 8, 16, 32  # queries of a tile
FETCH = 16  # a block is fetched in the time that so many queries take to read it
FETCHED_AT_ONCE = 1 << 20  # numbers, of keys and of values: what a cache holds


def read_blocks(
    turned: Tensor, store: BlockStore, ages: Tensor, lags: Tensor, needed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to each retrieved block alone.

    turned: (S, B, T, H, d), queries scaled and turned for lag 1…S. ages, lags: (B, H or 1, T or 1, q), which blocks,
    and how far back they stand. needed: (B, H, T), bool, queries that read at all (None: all do). Returns the block
    outputs (B, H, T, q, d) and the scores of the blocks' landmarks (B, H, T, q), the gates; both are 0 for queries
    that do not read.
    """
    if needed is not None:
        ages, lags = (x.expand(*needed.shape, -1) for x in (ages, lags))
    elif ages.shape[2] == 1:
        return _read_shared(turned, store, ages, lags)
    return _read_grouped(turned, store, ages, lags, needed)


def read_blocks_fused(
    turned: Tensor,
    store: BlockStore,
    ages: Tensor,
    lags: Tensor,
    *,
    local: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    needed: Tensor | None = None,
) -> Tensor:
    """Attend to the retrieved blocks and what the queries see besides, in one kernel, which reads them where they are.

    As `read_blocks`; local: output (B, H, T, d) and log-sum-exp (B, H, T) (None: nothing is seen besides); weight:
    (B, H, T), of the output (None: 1). Returns (B, H, T, d), 0 for queries that do not read.
    """
    _, batch, queries, heads, _ = turned.shape
    if needed is not None:
        ages, lags = (x.expand(-1, -1, queries, -1) for x in (ages, lags))
    samples = torch.arange(batch, device=turned.device)[:, None, None, None]
    kv_heads = torch.arange(heads, device=turned.device)[None, :, None, None] * store.kv_heads // heads
    places = (samples * store.kv_heads + kv_heads) * store.capacity + store.rows(ages)  # (B, H, T or 1, q)
    if needed is None:
        blocks = store.fetch(places.flatten())
        rows = blocks.rows.view_as(places)
    else:
        blocks = store.fetch(places[needed].flatten())
        rows = torch.zeros_like(places)
        rows[needed] = blocks.rows.view(-1, places.shape[-1])
    landmarks = store.landmarks.flatten(0, 2)
    return attend_to_blocks(
        turned, blocks.keys, blocks.values, landmarks, rows, places, lags, local=local, weight=weight, reading=needed
    )


def _read_shared(turned: Tensor, store: BlockStore, ages: Tensor, lags: Tensor) -> tuple[Tensor, Tensor]:
    """All queries of the chunk, or its only one, read the same blocks: plain attention of the chunk over each."""
    _, batch, queries, heads, dim = turned.shape
    count = ages.shape[-1]
    rows = store.rows(ages[:, :, 0])  # (B, H, q)
    lags = lags[:, :, 0]
    samples = torch.arange(batch, device=turned.device)[:, None, None]
    q_heads = torch.arange(heads, device=turned.device)[None, :, None]
    kv_heads = q_heads * store.kv_heads // heads
    q = turned.permute(0, 1, 3, 2, 4)[lags - 1, samples, q_heads]  # (B, H, q, T, d)
    places = ((samples * store.kv_heads + kv_heads) * store.capacity + rows).flatten()
    blocks = store.fetch(places)
    gates = torch.einsum("bhqtd,bhqd->bhtq", q, store.read_landmarks(places).view(batch, heads, count, dim))
    keys, values = blocks.read_keys()[:, None], blocks.read_values()[:, None]
    out, _ = attention_forward(q.reshape(-1, 1, queries, dim), keys, values, scale=1.0)
    return out.view(batch, heads, count, queries, dim).transpose(2, 3), gates


def _read_grouped(
    turned: Tensor, store: BlockStore, ages: Tensor, lags: Tensor, needed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries that chose the same block are put together in tiles, so that a block is fetched once a tile and not
    once a query.

    An *owner* is what chooses: a head of a sample (`per_token_and_head`) or a whole sample (`per_token`), whose heads
    then share the tile.
    """
    _, batch, queries, heads, dim = turned.shape
    owner_heads, count = ages.shape[1], ages.shape[-1]
    together = heads // owner_heads  # heads that choose as one
    kv_heads, capacity = store.kv_heads, store.capacity
    device = turned.device

    # Each (owner, query, block) is a pair; sorted by owner and block, pairs of one group are neighbours.
    owners = torch.arange(batch * owner_heads, device=device)
    group = (store.rows(ages).flatten(0, 1).flatten(1) + owners[:, None] * capacity).flatten()
    sample, head = owners // owner_heads, owners % owner_heads
    source = ((lags - 1).flatten(0, 1) * batch + sample[:, None, None]) * queries
    source = source + torch.arange(queries, device=device)[:, None]
    source = (source * owner_heads + head[:, None, None]).flatten()  # row of `turned`
    kept = None
    if needed is not None:
        kept = needed.flatten().repeat_interleave(count).nonzero().squeeze(1)
        group, source = group[kept], source[kept]
    group, order = group.sort()
    number = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).cumsum(0)])  # of the pair's group
    groups = int(number[-1]) + 1 if device.type == "cpu" else min(len(group), len(owners) * len(store))
    sizes = group.new_zeros(groups).scatter_add_(0, number, torch.ones_like(number))
    tile, count_tiles = _tiling(sizes, len(group))
    tiles = (sizes + tile - 1) // tile
    last = tiles.cumsum(0)
    rank = torch.arange(len(group), device=device) - (sizes.cumsum(0) - sizes)[number]
    place = (last - tiles)[number] * tile + rank
    back = torch.empty_like(place).scatter(0, order, place)  # where each pair's result stands
    rows = place.new_zeros(count_tiles * tile).scatter(0, place, source[order])
    of_tile = torch.searchsorted(last, torch.arange(count_tiles, device=device), right=True).clamp(max=groups - 1)
    of_tile = group.new_zeros(groups).scatter(0, number, group)[of_tile]

    owner, row = of_tile // capacity, of_tile % capacity
    first_head = (owner % owner_heads * together)[:, None] + torch.arange(together, device=device)
    kv = (owner // owner_heads * kv_heads)[:, None] + first_head * kv_heads // heads
    stored = kv * capacity + row[:, None]  # (tiles, together)
    turned = turned.reshape(-1, together * dim)
    out, gates = turned.new_empty(count_tiles, tile, together, dim), turned.new_empty(count_tiles, tile, together)
    step = max(1, FETCHED_AT_ONCE // (together * store.block_shape.numel()))
    # One place, for fresh memory is slow.
    one_place = store.landmarks.new_empty(min(step, count_tiles) * together, *store.block_shape)
    for start in range(0, count_tiles, step):
        part = slice(start, min(start + step, count_tiles))
        q = turned.index_select(0, rows[part.start * tile : part.stop * tile])
        q = q.view(-1, tile, together, dim).transpose(1, 2).flatten(0, 1)
        chosen = stored[part].flatten()
        fetched, blocks = store.fetch(chosen), one_place[: len(chosen)]
        weights = torch.bmm(q, fetched.read_keys(blocks).mT).softmax(-1)
        read = torch.bmm(weights, fetched.read_values(blocks))
        out[part] = read.unflatten(0, (-1, together)).transpose(1, 2)
        gate = torch.bmm(q, store.read_landmarks(chosen)[..., None])
        gates[part] = gate.view(-1, together, tile).transpose(1, 2)

    def spread(x: Tensor) -> Tensor:
        """(tiles, tile, together, …) → (B, H, T, q, …)."""
        x = x.flatten(0, 1).index_select(0, back)
        if kept is not None:
            x = x.new_zeros(ages.numel(), *x.shape[1:]).index_copy_(0, kept, x)
        x = x.view(batch, owner_heads, queries, count, together, -1)
        return x.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)

    return spread(out), spread(gates).squeeze(-1)


def _tiling(sizes: Tensor, pairs: int) -> tuple[int, int]:
    """Queries of a tile, and how many tiles: what is cheapest for groups of these sizes.

    On another device than the CPU, where looking would stall it, what is enough for groups of equal size, and as many
    tiles as that can take at most.
    """
    if sizes.device.type == "cpu":
        counts = {tile: int(((sizes + tile - 1) // tile).sum()) for tile in TILES}
        return min(counts.items(), key=lambda item: item[1] * (FETCH + item[0]))
    tile = next((tile for tile in TILES if tile * len(sizes) >= pairs), TILES[-1])
    return tile, min(pairs, len(sizes) + pairs // tile)
