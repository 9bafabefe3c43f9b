"""What the queries of a chunk read: the chunk itself, pending tokens and blocks, and how it is merged.

S: number of lags. q: blocks of each query.

A block is fetched once for many queries, which are put into tiles (`QueryTiles`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention import Grouped, Scoring, Window, landmark_attention
from landmark.attention.keys import Keys
from landmark.attention.plain import attention_forward
from landmark.attention.rotary import rotate
from landmark.attention.scoring import capped
from landmark.memory.landmarks.block_store import BlockStore
from landmark.memory.landmarks.layer import Question
from landmark.memory.tiers import Fetched

TILES = 1, 2, 4, 8, 16, 32  # possible numbers of queries of a tile
FETCH = 16  # fetching a block takes as long as the attention of so many queries to it
# Numbers of keys, and of values, that are fetched together: what fits into the processor's cache, or else many, because
# a GPU waits for the launches of every part.
FETCHED_AT_ONCE, FETCHED_ELSEWHERE = {"cpu": 1 << 18}, 1 << 27

WeightedSum = Callable[[Tensor], Tensor]
"""Of weights (B, H, T, q) of blocks, the sum of the blocks' outputs (B, H, T, d)."""


def attend_locally(question: Question, k: Tensor, v: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and log-sum-exp (B, H, T) of the queries of a question.

    k, v: (B, H_kv, pending + T, d), of pending tokens and chunk, k not rotated.
    """
    pending, width = k.shape[2] - question.q.shape[2], question.block_size + 1
    factors = question.rotary(0, k.shape[2], question.q)
    q, k = rotate(question.q, factors[pending:]), rotate(k, factors)
    complete = k.shape[2] // width * width
    if keys.landmark != "token" and complete:
        blocks = keys.with_means(k[:, :, :complete].unflatten(2, (-1, width)), question.gate.landmark_share)
        k = torch.cat([blocks.flatten(2, 3), k[:, :, complete:]], 2)
    seen, total = (tokens - tokens // width for tokens in (pending + 1, k.shape[2]))
    if question.backend != "triton" and k.shape[2] <= width and seen == total:
        # While generating, all queries see the same normal tokens, and no landmark.
        k, v = k[:, :, :total], v[:, :, :total]
        if (group := q.shape[1] // k.shape[1]) > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return attention_forward(q, k, v, scale=question.scale, softcap=question.softcap)
    layout, scoring = Window(question.block_size, prefix=pending), Scoring(question.scale, question.softcap)
    return landmark_attention(q, k, v, layout, gate=question.gate, scoring=scoring, backend=question.backend)


def merge(
    question: Question, local: tuple[Tensor, Tensor], blocks: tuple[WeightedSum, Tensor]
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and weights of the blocks (B, H, T, q): a softmax of gates merges blocks and local attention.

    With a context miss token the local output is multiplied by 1 − S already, and the blocks share S. local: output
    (B, H, T, d) and log-sum-exp (B, H, T). blocks: the weighted sum of their outputs, and their gates (B, H, T, q).
    """
    (out, lse), (weighted, gates) = local, blocks
    if question.cmt_weight is None:
        weights = torch.cat([lse[..., None], gates.to(lse.dtype)], -1).softmax(-1).to(out.dtype)
        return weights[..., :1] * out + weighted(weights[..., 1:]), weights[..., 1:]
    weights = gates.to(lse.dtype).softmax(-1) * question.cmt_weight[..., None]
    if question.retrieves is not None:
        weights = weights * question.retrieves[..., None]
    return out + weighted(weights.to(out.dtype)), weights


def read_and_merge_fused(question: Question, ages: Tensor, local: tuple[Tensor, Tensor]) -> Tensor:
    """`read_blocks` and `merge` in one kernel, which reads the blocks where they are stored: (B, H, T, d)."""
    from landmark.memory.landmarks.reading_kernels import attend_to_retrieved_blocks

    queries, store, retrieves = question.rounded, question.store, question.retrieves
    rows, blocks = None, store.in_place() if retrieves is None else None
    if blocks is None:
        rows, blocks = _fetched_rows(queries, store, ages, retrieves)
    stored = {"added": store.added, "recent": question.lags.own, "rows": rows, "alpha": question.gate.alpha}
    tensors = queries, *blocks, store.landmarks, ages
    if question.cmt_weight is None:
        return attend_to_retrieved_blocks(*tensors, **stored, local=local)
    weighted = {"weight": question.cmt_weight, "selected": retrieves}
    return local[0] + attend_to_retrieved_blocks(*tensors, **stored, **weighted)


def _fetched_rows(
    queries: Tensor, store: BlockStore, ages: Tensor, selected: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Fetch the blocks of the queries that retrieve: their rows (B, H, T or 1, q), and keys and values (m, ℓ, d)."""
    ages = for_each_head(ages, queries.shape[3])
    places = store.places(ages if selected is None else ages.expand(-1, -1, queries.shape[2], -1))
    if selected is None:
        blocks = store.fetch(places.flatten())
        rows = blocks.rows.view_as(places)
    else:
        blocks = store.fetch(places[selected].flatten())
        rows = torch.zeros_like(places)
        rows[selected] = blocks.rows.view(-1, places.shape[-1])
    return rows, (blocks.keys, blocks.values)


def read_blocks(question: Question, ages: Tensor) -> tuple[WeightedSum, Tensor]:
    """Attend to each block of these ages separately, at its position of attention.

    Returns the weighted sum of the blocks' outputs, and their gates (B, H, T, q), 0 for queries that do not retrieve.
    """
    tiles = QueryTiles(question, question.rounded, ages, question.lags.attending(ages), question.retrieves)
    out, gates = tiles.empty(tiles.dim), tiles.empty(dtype=tiles.store.landmarks.dtype)
    for part in tiles.parts():
        values = torch.index_select(part.blocks.values, 0, part.blocks.rows, out=part.buffer)
        out[part.tiles] = tiles.split(torch.bmm(part.scores.softmax(-1), values))
        gates[part.tiles] = tiles.split(tiles.gates(part, question.gate))
    return partial(tiles.weighted_sum, out), tiles.to_queries(gates).squeeze(-1)


def weights_of_blocks(question: Question, ages: Tensor, selected: Tensor | None) -> Tensor:
    """s_b + log Σ_j exp s_j of each query and block, (B, H, T, q), in the type of landmarks: the gate with α = 1.

    s_b: score of block b's landmark; s_j: of its tokens j; at the positions of scoring. 0 for queries that are not
    selected.
    """
    tiles = QueryTiles(question, question.rounded, ages, question.lags.scoring(ages), selected)
    weights = tiles.empty(dtype=tiles.store.landmarks.dtype)
    for part in tiles.parts():
        weights[part.tiles] = tiles.split(tiles.gates(part, Grouped(1.0)))
    return tiles.to_queries(weights)[..., 0]


class FetchedTiles(NamedTuple):
    """Tiles whose m blocks of one key/value head are fetched together.

    tiles: their numbers. q: (m, r, d), the r queries that read a block. places: (m,), in (B, H_kv, capacity),
    flattened. scores: (m, r, ℓ). buffer: for the values, (m, ℓ, d).
    """

    tiles: slice
    q: Tensor
    places: Tensor
    blocks: Fetched
    scores: Tensor
    buffer: Tensor


class QueryTiles:
    """The pairs of query and block of one chunk, in tiles.

    1. Sort the pairs by *owner* and block. An owner is a key/value head of a sample, whose query heads read the same
       blocks, or with "per_token" a whole sample, whose heads choose together.
    2. Put the queries of an owner that chose the same block into tiles.
    3. `parts`: compute tile by tile. `to_queries`: put the results back in the order of the queries.
    """

    def __init__(self, question: Question, rotated: Tensor, ages: Tensor, lags: Tensor, selected: Tensor | None):
        """rotated: (S, B, T, H, d). ages, lags: (B, H, H_kv or 1, T or 1, q). selected: (B, H, T), bool; None: all."""
        self.store, self.softcap = question.store, question.softcap
        store = self.store
        _, batch, queries, heads, self.dim = rotated.shape
        if selected is not None:
            ages, lags = (for_each_head(x, heads) for x in (ages, lags))
        ages, lags = (x.expand(-1, -1, queries, -1) for x in (ages, lags))
        choosing, count = ages.shape[1], ages.shape[-1]  # heads, or groups, that choose by themselves: H, H_kv or 1
        kv_heads, capacity, device = store.kv_heads, store.capacity, rotated.device
        self._fetched = kv_heads if choosing == 1 else 1  # key/value heads of an owner, whose blocks a tile fetches
        self._together = heads // choosing  # query heads of a row of a tile
        owners = batch * kv_heads // self._fetched
        self._queries = rotated.reshape(-1, self._together * self.dim)
        self._shape, self._pairs = (batch, choosing, queries, count), ages.numel()

        # `group`: owner and block of each pair, as one number. Sorted, the pairs of a group are neighbours.
        sample = torch.arange(batch, device=device)[:, None, None, None]
        head = torch.arange(choosing, device=device)[:, None, None]
        owner = sample * (kv_heads // self._fetched) + head * kv_heads // choosing
        group = (store.rows(ages) + owner * capacity).flatten()
        source = ((lags - 1) * batch + sample) * queries + torch.arange(queries, device=device)[:, None]
        source = (source * choosing + head).flatten()  # row of `_queries`
        self._selected_pairs = None
        if selected is not None:
            self._selected_pairs = selected.flatten().repeat_interleave(count).nonzero().squeeze(1)
            group, source = group[self._selected_pairs], source[self._selected_pairs]
        group, order = group.sort()
        number = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).cumsum(0)])  # of the pair's group
        groups = int(number[-1]) + 1 if device.type == "cpu" else min(len(group), owners * len(store))
        sizes = group.new_zeros(groups).scatter_add_(0, number, torch.ones_like(number))
        self._tile, self._count = _tiling(sizes, len(group))
        tiles = (sizes + self._tile - 1) // self._tile
        last = tiles.cumsum(0)
        rank = torch.arange(len(group), device=device) - (sizes.cumsum(0) - sizes)[number]
        place = (last - tiles)[number] * self._tile + rank
        self._back = torch.empty_like(place).scatter(0, order, place)  # where each pair's result stands
        self._rows = place.new_zeros(self._count * self._tile).scatter(0, place, source[order])
        tile_head = torch.searchsorted(last, torch.arange(self._count, device=device), right=True).clamp(max=groups - 1)
        tile_head = group.new_zeros(groups).scatter(0, number, group)[tile_head]
        head_places = (tile_head // capacity * self._fetched)[:, None] + torch.arange(self._fetched, device=device)
        self._places = head_places * capacity + (tile_head % capacity)[:, None]

    def parts(self) -> Iterator[FetchedTiles]:
        """The scores of all pairs, many tiles at a time."""
        together = FETCHED_AT_ONCE.get(self._queries.device.type, FETCHED_ELSEWHERE)
        step = max(1, together // (self._fetched * self.store.block_shape.numel()))
        buffer = self._queries.new_empty(min(step, self._count) * self._fetched, *self.store.block_shape)  # slow
        for start in range(0, self._count, step):
            part = slice(start, min(start + step, self._count))
            q = self._queries.index_select(0, self._rows[part.start * self._tile : part.stop * self._tile])
            q = q.view(-1, self._tile, self._fetched, self._together // self._fetched, self.dim)
            q = q.transpose(1, 2).flatten(0, 1).flatten(1, 2)
            places = self._places[part].flatten()
            blocks, room = self.store.fetch(places), buffer[: len(places)]
            keys = torch.index_select(blocks.keys, 0, blocks.rows, out=room)
            scores = capped(torch.bmm(q, keys.mT), self.softcap)
            yield FetchedTiles(part, q, places, blocks, scores, room)

    def gates(self, part: FetchedTiles, gate: Grouped) -> Tensor:
        """The gates of a part's blocks, (m, r, 1), in the type of the landmarks."""
        landmarks = self.store.read_landmarks(part.places)[..., None]
        scores = capped(torch.bmm(part.q.to(landmarks.dtype), landmarks), self.softcap)
        return gate.block_gates(scores, lambda: _logsumexp(part.scores.to(landmarks.dtype)))

    def empty(self, width: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Room for results of all tiles: `width` numbers for each pair and query head."""
        shape = self._tile, self._fetched, self._together // self._fetched, width
        return self._queries.new_empty(self._count, *shape, dtype=dtype)

    def split(self, x: Tensor) -> Tensor:
        """Results (m, r, width) of a part as they stand in `empty`."""
        x = x.unflatten(0, (-1, self._fetched)).unflatten(2, (self._tile, -1))
        return x.transpose(1, 2)

    def to_queries(self, x: Tensor) -> Tensor:
        """Results of all tiles, as in `empty`, → (B, H, T, q, width); 0 for queries that are not selected."""
        x = x.flatten(0, 1).index_select(0, self._back)
        if self._selected_pairs is not None:
            x = x.new_zeros(self._pairs, *x.shape[1:]).index_copy_(0, self._selected_pairs, x)
        batch, choosing, queries, count = self._shape
        x = x.view(batch, choosing, queries, count, self._together, -1)
        return x.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Results of all tiles, summed over the blocks of each query with weights (B, H, T, q): (B, H, T, width).

        It is the sum over `to_queries(x)`, which is not made: on a CPU that takes up to 50 times as long.
        """
        batch, choosing, queries, count = self._shape
        rows = self._back.view(-1, 1, count) * self._together
        rows = rows + torch.arange(self._together, device=rows.device)[:, None]
        own = weights.unflatten(1, (choosing, self._together)).transpose(2, 3).flatten(0, 2)
        asking = None if self._selected_pairs is None else self._selected_pairs[::count] // count
        own = own if asking is None else own.index_select(0, asking)
        table = x.view(-1, x.shape[-1]).to(weights.dtype)
        out = F.embedding_bag(rows.flatten(0, 1), table, per_sample_weights=own.flatten(0, 1), mode="sum")
        out = out.view(-1, self._together, x.shape[-1])
        if asking is not None:
            out = out.new_zeros(batch * choosing * queries, *out.shape[1:]).index_copy_(0, asking, out)
        return out.view(batch, choosing, queries, self._together, -1).transpose(2, 3).flatten(1, 2)


def _logsumexp(scores: Tensor) -> Tensor:
    """Of scores (…, ℓ), (…, 1): PyTorch's softmax takes half as long as its log-sum-exp."""
    return scores[..., :1] - scores.log_softmax(-1)[..., :1]


def for_each_head(chosen: Tensor, heads: int) -> Tensor:
    """What each query head has, (B, H, …), of what heads that choose together or share keys have."""
    return chosen if chosen.shape[1] == heads else chosen.repeat_interleave(heads // chosen.shape[1], 1)


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
