"""Attention of queries to their retrieved blocks, block by block, and the merge of the outputs.

S: number of lags. n: number of queries, all T of a chunk or the selected ones. q: blocks retrieved for each query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.flash import attention_forward
from landmark.attention.fused.retrieved_blocks import attend_to_retrieved_blocks
from landmark.attention.softcap import capped
from landmark.memory.block_store import BlockStore
from landmark.memory.cutoff import QuerySelection

TILES = 1, 2, 4, 8, 16, 32  # possible numbers of queries of a tile
FETCH = 16  # fetching a block takes as long as the attention of so many queries to it
FETCHED_AT_ONCE = 1 << 20  # numbers of keys, and of values, that fit into the processor's cache


def attend_to_blocks(
    rotated_queries: Tensor,
    store: BlockStore,
    ages: Tensor,
    lags: Tensor,
    selected: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to each retrieved block separately.

    Args:
        rotated_queries: (S, B, n, H, d), scaled, and rotated for lag 1…S.
        store: the layer's blocks.
        ages: (B, H, H_kv or 1, n or 1, q), the retrieved blocks; 1 is the newest block.
        lags: shape of ages, the lag of each block (positions.py).
        selected: (B, H, n), bool, queries that retrieve; None: all do.
        softcap: cap of the scores, and of the gates; None: there is none.

    Returns the output for each block (B, H, n, q, d), and its gate (B, H, n, q), the score of its landmark. Both are 0
    for queries that do not retrieve.
    """
    if selected is not None:
        ages, lags = (for_each_head(x, selected.shape[1]).expand(*selected.shape, -1) for x in (ages, lags))
    elif ages.shape[2] == 1:
        ages, lags = (for_each_head(x, rotated_queries.shape[3]) for x in (ages, lags))
        return _attend_shared(rotated_queries, store, ages, lags, softcap)
    return _attend_grouped(rotated_queries, store, ages, lags, selected, softcap)


def merge(
    local: tuple[Tensor, Tensor], block_out: Tensor, gates: Tensor, selection: QuerySelection | None
) -> tuple[Tensor, Tensor]:
    """Merge the outputs of the blocks and of local attention, by a softmax of the gates.

    With a context miss token the local output is multiplied by 1 − S already, and the blocks share S.

    Args:
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention.
        block_out: (B, H, n, q, d).
        gates: (B, H, n, q).
        selection: the n queries; None: the model has no context miss token.

    Returns the output (B, H, T, d) and the weights of the blocks (B, H, n, q).
    """
    out, lse = local
    if selection is None:
        weights = torch.cat([lse[..., None], gates.to(lse.dtype)], -1).softmax(-1).to(out.dtype)
        of_blocks = weights[..., 1:]
        return weights[..., :1] * out + weighted_sum(of_blocks, block_out), of_blocks
    weights = gates.to(lse.dtype).softmax(-1) * selection.gather(selection.cmt_weight)[..., None]
    if selection.selected is not None:
        weights = weights * selection.selected[..., None]
    return selection.scatter_add(out, weighted_sum(weights.to(out.dtype), block_out)), weights


def weighted_sum(weights: Tensor, block_out: Tensor) -> Tensor:
    """Σ_q of weights (B, H, n, q) times block_out (B, H, n, q, d)."""
    return (weights[..., None, :] @ block_out)[..., 0, :]


def attend_to_blocks_fused(
    rotated_queries: Tensor,
    store: BlockStore,
    ages: Tensor,
    num_recent: int,
    local: tuple[Tensor, Tensor],
    selection: QuerySelection | None,
) -> Tensor:
    """`attend_to_blocks` and `merge` in one kernel, which reads the blocks where they are stored.

    Args: as in `attend_to_blocks` and `merge`; num_recent: of the newest blocks, how many have a lag of their own.

    Returns the output (B, H, T, d).
    """
    heads, selected = rotated_queries.shape[3], None if selection is None else selection.selected
    count = ages.numel() // ages.shape[1] * heads
    rows, blocks = None, store.in_place(count) if selected is None else None
    if blocks is None:
        rows, blocks = _fetched_rows(rotated_queries, store, ages, selected)
    of_store = {"added": store.added, "recent": num_recent, "rows": rows, "sizes": store.sizes}
    tensors = rotated_queries, *blocks, store.landmarks, ages
    if selection is None:
        return attend_to_retrieved_blocks(*tensors, **of_store, local=local)
    weight = selection.gather(selection.cmt_weight)
    out = attend_to_retrieved_blocks(*tensors, **of_store, weight=weight, selected=selected)
    return selection.scatter_add(local[0], out)


def _fetched_rows(
    rotated_queries: Tensor, store: BlockStore, ages: Tensor, selected: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Fetch the blocks of the queries that retrieve: their rows (B, H, n or 1, q), and keys and values (m, ℓ, d)."""
    _, batch, queries, heads, _ = rotated_queries.shape
    ages = for_each_head(ages, heads)
    if selected is not None:
        ages = ages.expand(-1, -1, queries, -1)
    samples = torch.arange(batch, device=ages.device)[:, None, None, None]
    kv_heads = torch.arange(heads, device=ages.device)[None, :, None, None] * store.kv_heads // heads
    places = (samples * store.kv_heads + kv_heads) * store.capacity + store.rows(ages)  # (B, H, n or 1, q)
    if selected is None:
        blocks = store.fetch(places.flatten())
        rows = blocks.rows.view_as(places)
    else:
        blocks = store.fetch(places[selected].flatten())
        rows = torch.zeros_like(places)
        rows[selected] = blocks.rows.view(-1, places.shape[-1])
    return rows, (blocks.keys, blocks.values)


def for_each_head(chosen: Tensor, heads: int) -> Tensor:
    """The blocks of each query head, where heads that share keys choose together; (B, 1, …) stays as it is."""
    return chosen if chosen.shape[1] in (1, heads) else chosen.repeat_interleave(heads // chosen.shape[1], 1)


def _attend_shared(
    rotated_queries: Tensor, store: BlockStore, ages: Tensor, lags: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`attend_to_blocks` where all queries of a head retrieve the same blocks: plain attention to each block."""
    _, batch, queries, heads, dim = rotated_queries.shape
    count, device = ages.shape[-1], rotated_queries.device
    samples = torch.arange(batch, device=device)[:, None, None]
    q_heads = torch.arange(heads, device=device)[None, :, None]
    q = rotated_queries.permute(0, 1, 3, 2, 4)[lags[:, :, 0] - 1, samples, q_heads]  # (B, H, q, T, d)
    first = torch.arange(0, batch * store.kv_heads * store.capacity, store.capacity, device=device)
    first = for_each_head(first.view(batch, -1, 1), heads)
    places = (first + store.rows(ages[:, :, 0])).flatten()  # (B, H, q)
    blocks = store.fetch(places)
    landmarks = store.read_landmarks(places).view(batch, heads, count, dim)
    gates = capped((q.to(landmarks.dtype) @ landmarks[..., None])[..., 0].mT, softcap)
    keys, values = blocks.read_keys()[:, None], blocks.read_values()[:, None]
    q = q.reshape(-1, 1, queries, dim)
    is_token = store.is_token(places)
    if is_token is None:
        out, _ = attention_forward(q, keys, values, scale=1.0, softcap=softcap)
    else:
        scores = capped(q @ keys.mT, softcap).masked_fill(~is_token[:, None, None], -torch.inf)
        out = scores.softmax(-1) @ values
    return out.view(batch, heads, count, queries, dim).transpose(2, 3), gates


def _attend_grouped(
    rotated_queries: Tensor,
    store: BlockStore,
    ages: Tensor,
    lags: Tensor,
    selected: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend_to_blocks` where each query has blocks of its own.

    1. Sort the pairs of query and block by *owner* and block. An owner is a key/value head of a sample, whose query
       heads read the same blocks, or with "per_token" a whole sample, whose heads choose together.
    2. Put the queries of an owner that chose the same block into tiles, so that a block is fetched once for a tile.
    3. Attend tile by tile, and put the results back in the order of the queries.
    """
    _, batch, queries, heads, dim = rotated_queries.shape
    choosing, count = ages.shape[1], ages.shape[-1]  # heads, or groups, that choose by themselves: H, H_kv or 1
    kv_heads, capacity = store.kv_heads, store.capacity
    device = rotated_queries.device
    fetched = kv_heads if choosing == 1 else 1  # key/value heads of an owner, whose blocks a tile fetches together
    together = heads // choosing  # query heads of a row of a tile
    owners = batch * kv_heads // fetched

    # `group`: owner and block of each pair, as one number. Sorted, the pairs of a group are neighbours.
    sample = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.arange(choosing, device=device)[:, None, None]
    owner = sample * (kv_heads // fetched) + head * kv_heads // choosing
    group = (store.rows(ages) + owner * capacity).flatten()
    source = ((lags - 1) * batch + sample) * queries + torch.arange(queries, device=device)[:, None]
    source = (source * choosing + head).flatten()  # row of `rotated_queries`
    kept = None
    if selected is not None:
        kept = selected.flatten().repeat_interleave(count).nonzero().squeeze(1)
        group, source = group[kept], source[kept]
    group, order = group.sort()
    number = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).cumsum(0)])  # of the pair's group
    groups = int(number[-1]) + 1 if device.type == "cpu" else min(len(group), owners * len(store))
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

    of_head = of_tile // capacity * fetched
    stored = (of_head[:, None] + torch.arange(fetched, device=device)) * capacity + (of_tile % capacity)[:, None]
    flat_queries = rotated_queries.reshape(-1, together * dim)
    shape = -1, tile, fetched, together // fetched, dim
    out = flat_queries.new_empty(count_tiles, *shape[1:])
    gates = store.landmarks.new_empty(count_tiles, *shape[1:-1])
    step = max(1, FETCHED_AT_ONCE // (fetched * store.block_shape.numel()))
    buffer = flat_queries.new_empty(min(step, count_tiles) * fetched, *store.block_shape)  # allocation is slow
    for start in range(0, count_tiles, step):
        part = slice(start, min(start + step, count_tiles))
        q = flat_queries.index_select(0, rows[part.start * tile : part.stop * tile])
        q = q.view(shape).transpose(1, 2).flatten(0, 1).flatten(1, 2)
        chosen = stored[part].flatten()
        blocks, keys = store.fetch(chosen), buffer[: len(chosen)]
        values = keys
        if q.requires_grad:  # the backward pass needs both
            keys, values = torch.empty_like(keys), torch.empty_like(keys)
        scores = capped(torch.bmm(q, blocks.read_keys(keys).mT), softcap)
        if (is_token := store.is_token(chosen)) is not None:
            scores = scores.masked_fill(~is_token[:, None], -torch.inf)
        block_out = torch.bmm(scores.softmax(-1), blocks.read_values(values))
        out[part] = block_out.view(-1, fetched, tile, *shape[3:]).transpose(1, 2)
        gate = capped(torch.bmm(q.to(gates.dtype), store.read_landmarks(chosen)[..., None]), softcap)
        gates[part] = gate.view(-1, fetched, tile, shape[3]).transpose(1, 2)

    def untile(x: Tensor) -> Tensor:
        """(tiles, tile, fetched, together / fetched, …) → (B, H, n, q, …)."""
        x = x.flatten(0, 1).index_select(0, back)
        if kept is not None:
            x = x.new_zeros(ages.numel(), *x.shape[1:]).index_copy_(0, kept, x)
        x = x.view(batch, choosing, queries, count, together, -1)
        return x.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)

    return untile(out), untile(gates).squeeze(-1)


def _tiling(sizes: Tensor, pairs: int) -> tuple[int, int]:
    """Queries of a tile, and number of tiles: the fastest choice for groups of these sizes.

    Reading the sizes would stall a GPU. There tiles are chosen as for groups of equal size, and the number of tiles is
    the largest possible.
    """
    if sizes.device.type == "cpu":
        counts = {tile: int(((sizes + tile - 1) // tile).sum()) for tile in TILES}
        return min(counts.items(), key=lambda item: item[1] * (FETCH + item[0]))
    tile = next((tile for tile in TILES if tile * len(sizes) >= pairs), TILES[-1])
    return tile, min(pairs, len(sizes) + pairs // tile)
