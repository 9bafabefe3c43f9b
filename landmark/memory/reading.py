"""Attention of queries over the blocks they retrieved, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.flash import attention_forward
from landmark.memory.store import BlockStore

TILE = 32


def read_blocks(turned: Tensor, store: BlockStore, ages: Tensor, lags: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to each retrieved block alone.

    turned: (S, B, T, H, d), queries scaled and turned for lag 1…S. ages, lags: (B, H or 1, T or 1, q), which blocks,
    and how far back they stand. Returns the block outputs (B, H, T, q, d) and the scores of the blocks' landmarks
    (B, H, T, q), the gates.
    """
    if ages.shape[2] == 1 and turned.shape[2] > 1:
        return _read_shared(turned, store, ages, lags)
    return _read_grouped(turned, store, ages, lags)


def _read_shared(turned: Tensor, store: BlockStore, ages: Tensor, lags: Tensor) -> tuple[Tensor, Tensor]:
    """All queries of the chunk read the same blocks: plain attention of the chunk over each."""
    _, batch, queries, heads, dim = turned.shape
    count = ages.shape[-1]
    rows = store.rows(ages[:, :, 0])  # (B, H, q)
    lags = lags[:, :, 0]
    samples = torch.arange(batch, device=turned.device)[:, None, None]
    q_heads = torch.arange(heads, device=turned.device)[None, :, None]
    kv_heads = q_heads * store.keys.shape[1] // heads
    q = turned.permute(0, 1, 3, 2, 4)[lags - 1, samples, q_heads]  # (B, H, q, T, d)
    keys, values = store.keys[samples, kv_heads, rows], store.values[samples, kv_heads, rows]
    gates = torch.einsum("bhqtd,bhqd->bhtq", q, store.landmarks[samples, kv_heads, rows])
    out, _ = attention_forward(
        q.reshape(-1, 1, queries, dim), keys.flatten(0, 2)[:, None], values.flatten(0, 2)[:, None], scale=1.0
    )
    return out.view(batch, heads, count, queries, dim).transpose(2, 3), gates


def _read_grouped(turned: Tensor, store: BlockStore, ages: Tensor, lags: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that chose the same block are put together in tiles, so that a block is fetched once a tile and not
    once a query.

    An *owner* is what chooses: a head of a sample (`per_token_and_head`) or a whole sample (`per_token`), whose heads
    then share the tile.
    """
    _, batch, queries, heads, dim = turned.shape
    owner_heads, count = ages.shape[1], ages.shape[-1]
    together = heads // owner_heads  # heads that choose as one
    kv_heads, capacity = store.keys.shape[1:3]
    device = turned.device

    # Each (owner, query, block) is a pair; sorted by owner and block, pairs of one group are neighbours.
    owners = torch.arange(batch * owner_heads, device=device)
    block = (store.rows(ages).flatten(0, 1).flatten(1) + owners[:, None] * capacity).flatten()
    sample, head = owners // owner_heads, owners % owner_heads
    source = ((lags - 1).flatten(0, 1) * batch + sample[:, None, None]) * queries
    source = source + torch.arange(queries, device=device)[:, None]
    source = (source * owner_heads + head[:, None, None]).flatten()  # row of `turned`
    block, order = block.sort()
    groups, sizes = block.unique_consecutive(return_counts=True)
    tile = min(TILE, queries)
    tiles = (sizes + tile - 1) // tile
    group_of_tile = torch.repeat_interleave(torch.arange(len(groups), device=device), tiles)
    group_of_pair = torch.repeat_interleave(torch.arange(len(groups), device=device), sizes)
    rank = torch.arange(len(block), device=device) - (sizes.cumsum(0) - sizes)[group_of_pair]
    place = (tiles.cumsum(0) - tiles)[group_of_pair] * tile + rank

    filler = torch.zeros(len(group_of_tile) * tile, dtype=torch.int64, device=device)
    rows = filler.scatter(0, place, source[order])
    q = turned.reshape(-1, together * dim).index_select(0, rows).view(-1, tile, together, dim).transpose(1, 2)

    key = groups[group_of_tile]
    owner, row = key // capacity, key % capacity
    first_head = (owner % owner_heads * together)[:, None] + torch.arange(together, device=device)
    kv = (owner // owner_heads * kv_heads)[:, None] + first_head * kv_heads // heads
    stored = (kv * capacity + row[:, None]).flatten()

    def fetch(x: Tensor) -> Tensor:
        return x.flatten(0, 2).index_select(0, stored).unflatten(0, (-1, together))

    out, _ = attention_forward(q, fetch(store.keys), fetch(store.values), scale=1.0)
    gates = q @ fetch(store.landmarks)[..., None]

    back = torch.empty_like(place).scatter(0, order, place)  # where each pair's result stands

    def spread(x: Tensor) -> Tensor:
        """(tiles, together, tile, …) → (B, H, T, q, …)."""
        x = x.transpose(1, 2).flatten(0, 1).index_select(0, back)
        x = x.view(batch, owner_heads, queries, count, together, -1)
        return x.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)

    return spread(out), spread(gates).squeeze(-1)
