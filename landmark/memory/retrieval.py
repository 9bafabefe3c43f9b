"""Retrieval of blocks: score all, reduce to the granularity, choose the top k (paper, Sections 3.2 and 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from landmark.attention.fused.top_k_landmarks import MOST, YOUNGEST, top_k_landmarks
from landmark.attention.softcap import capped, capped_in_place
from landmark.memory.block_store import BlockStore
from landmark.memory.query_window import best_of_window
from landmark.memory.settings import choosing_heads

SCORED_AT_ONCE = {"cpu": 1 << 21}  # by device: scores computed together; on the CPU they fit into its cache
SCORED_ELSEWHERE = 1 << 27
GROUP = 32  # most scores of a group in `_highest`
FEW = 1 << 14  # scores of which a CPU finds the highest sooner in one pass


def scored_at_once(device: torch.device) -> int:
    """How many scores a device computes together: on the CPU as many as fit into its cache."""
    return SCORED_AT_ONCE.get(device.type, SCORED_ELSEWHERE)


def retrieve(
    rotated_queries: Tensor,
    store: BlockStore,
    *,
    k: int,
    granularity: str,
    scorer: str,
    tie: bool,
    generator: torch.Generator,
    num_recent: int,
    softcap: float | None = None,
    kept: int = 0,
    window: int = 1,
    before: int = 0,
    fused: bool = False,
) -> Tensor:
    """Choose the blocks that each query retrieves.

    Args:
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S, in the type of the store's landmarks.
        store: the layer's blocks.
        k: blocks to retrieve.
        granularity: as in `landmark.memory.Memory`.
        scorer: as in `landmark.memory.Memory`.
        tie: whether all blocks older than the recent ones get one and the same score (layer 0, where all landmarks are
            the same vector up to rounding).
        generator: random numbers of the scorer "random".
        num_recent: number of newest blocks that have their own lag; all older ones are scored at lag S. It is k with
            the stingy mapping, 0 with true positions.
        softcap: cap of the scores; None: there is none.
        kept: newest blocks that are always among the k.
        window, before: queries that choose together, and those at the start that choose nothing (query_window.py).
        fused: whether a Triton kernel may choose, where it can.

    Returns the ages of the retrieved blocks, oldest first, int64 (B, H, T, q) with q = min(k, blocks kept); T is 1 for
    "per_head", and H is 1 for "per_token" and H_kv for "per_token_and_group". Age 1 is the newest block. Among equal
    scores the newer blocks are chosen.
    """
    _, batch, queries, heads, _ = rotated_queries[:, :, before:].shape
    count, device = min(k, len(store)), rotated_queries.device
    shape = _sets(granularity, rotated_queries[:, :, before:], store)
    if scorer == "recent" or count == len(store):
        return torch.arange(count, 0, -1, device=device).expand(*shape, count)
    if scorer == "random":
        scores = torch.rand(*shape, len(store), generator=generator, device=device)
        return best_ages(scores, store.ages(), count).sort(-1, descending=True).values
    tied = count if tie and scorer == "landmark" else 0
    summaries = store.means if scorer == "mean_key" else store.landmarks
    by_itself = granularity == "per_token_and_head" and not tied and softcap is None and not kept and window == 1
    if fused and by_itself and summaries.dtype == torch.float32 and count <= MOST:
        of_store = {"added": store.added, "blocks": len(store), "recent": num_recent}
        return top_k_landmarks(rotated_queries, summaries, **of_store, k=count).sort(-1, descending=True).values
    retrieved = torch.empty(*shape, count, dtype=torch.int64, device=device)
    group, buffer = heads // summaries.shape[1], rotated_queries.new_empty(0)
    for kv, part in _parts(summaries.shape[1], queries, batch * group * len(store), granularity, device):
        of_heads = slice(kv.start * group, kv.stop * group)
        first = max(0, before + part.start - window + 1)  # query that they choose with
        q = rotated_queries[:, :, first : before + part.stop, of_heads]
        size = q[0, ..., 0].numel() * len(store)
        buffer = buffer if buffer.numel() >= size else rotated_queries.new_empty(size)  # allocating memory is slow
        scores, ages, normaliser = _scores(q, summaries[:, kv], store, num_recent, tied, softcap, buffer[:size])
        # The maximum of log-probabilities ranks as that of probabilities, without underflow.
        if granularity != "per_token_and_head" or window > 1:
            scores = scores - normaliser()[..., None]
        if granularity == "per_head":
            scores, part = scores.amax(2, keepdim=True), slice(None)
        elif granularity != "per_token_and_head":
            of_heads = kv if granularity == "per_token_and_group" else slice(0, 1)
            scores = scores.unflatten(1, (of_heads.stop - of_heads.start, -1)).amax(2)
        if window > 1 and granularity != "per_head":
            scores = best_of_window(scores, window, before + part.start - first)
        if kept:
            scores[..., ages <= kept] = math.inf
        retrieved[:, of_heads, part] = best_ages(scores, ages, count)
    return retrieved.sort(-1, descending=True).values


def retrieve_given(store: BlockStore, given: Tensor, rotated_queries: Tensor, k: int, granularity: str) -> Tensor:
    """Retrieve the same blocks for every query: those given, newest first, then the most recent others.

    Args:
        store: the layer's blocks.
        given: (B, n), ages of blocks; those that are not in the store do not count.
        rotated_queries: as for `retrieve`.
        k: blocks to retrieve.
        granularity: as for `retrieve`.

    Returns ages as `retrieve` does.
    """
    shape, ages = _sets(granularity, rotated_queries, store), store.ages()
    count = min(k, len(ages))
    is_given = (given.to(ages.device)[:, :, None] == ages).any(1).float()
    return best_ages(is_given, ages, count).sort(-1, descending=True).values[:, None, None].expand(*shape, count)


def scores_of_all(rotated_queries: Tensor, store: BlockStore, num_recent: int, softcap: float | None) -> Tensor:
    """The scores of all landmarks by their rows, (B, H, T, blocks). Args: as for `retrieve`."""
    _, batch, queries, heads, _ = rotated_queries.shape
    buffer = rotated_queries.new_empty(batch * heads * queries * len(store))
    return _scores(rotated_queries, store.landmarks, store, num_recent, 0, softcap, buffer)[0]


def _sets(granularity: str, rotated_queries: Tensor, store: BlockStore) -> tuple[int, int, int]:
    """Sets of blocks that are chosen, (B, heads, queries)."""
    _, batch, queries, heads, _ = rotated_queries.shape
    return batch, choosing_heads(granularity, heads, store.kv_heads), 1 if granularity == "per_head" else queries


def _parts(
    heads: int, queries: int, scores: int, granularity: str, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Slices of key/value heads and of queries to score together; those that choose together are not parted.

    scores: number of scores of one key/value head and one query.
    """
    room = scored_at_once(device) // scores
    of_heads, of_queries = max(1, min(heads, room // queries)), max(1, min(queries, room // heads))
    if granularity == "per_head":
        of_queries = queries
    else:
        of_heads = heads
    for head in range(0, heads, of_heads):
        for query in range(0, queries, of_queries):
            yield slice(head, min(head + of_heads, heads)), slice(query, min(query + of_queries, queries))


def _scores(
    rotated_queries: Tensor,
    summaries: Tensor,
    store: BlockStore,
    num_recent: int,
    tied: int,
    softcap: float | None,
    buffer: Tensor,
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Scores (B, H, T, n) of n blocks, their ages (n,), and a function for the log-sum-exp over all blocks kept.

    The function returns (B, H, T). tied: if blocks older than the recent ones share one score, how many of them, the
    newest, are among the n; 0 if each has its own. summaries: (B, H_kv, capacity, d), landmarks or mean keys. buffer:
    memory for the scores.
    """
    _, _, queries, heads, _ = rotated_queries.shape
    group, recent = heads // summaries.shape[1], min(num_recent, len(store))
    older = len(store) - recent
    lagged = rotated_queries[:recent].flip(0)  # for the recent blocks, the oldest of them first

    def against(rows: Tensor | slice, dimensions: str, q: Tensor) -> Tensor:
        keys = summaries[:, :, rows]
        keys = keys if group == 1 else keys.repeat_interleave(group, 1)
        return capped(torch.einsum(f"{dimensions},bhnd->bhtn", q, keys), softcap)

    if tied:
        same = min(older, tied)
        ages = torch.arange(recent + same, 0, -1, device=rotated_queries.device)
        shared = against(store.rows(ages[same - 1 : same]), "bthd", rotated_queries[-1])
        scores = against(store.rows(ages[same:]), "nbthd", lagged)
        every = torch.cat([shared + math.log(older), scores], -1)
        return torch.cat([shared.expand(-1, -1, -1, same), scores], -1), ages, lambda: every.logsumexp(-1)
    keys = summaries[:, :, : len(store)]
    scan = rotated_queries[-1].transpose(1, 2).reshape(-1, group * queries, keys.shape[-1])
    everything = buffer.view(len(scan), -1, keys.shape[2])
    everything = torch.bmm(scan, keys.flatten(0, 1).mT, out=everything).view(len(keys), heads, queries, -1)
    capped_in_place(everything, softcap)
    for rows, part in store.runs(store.added - recent, recent):
        everything[..., rows] = against(rows, "nbthd", lagged[part])
    return everything, store.ages(), lambda: everything.logsumexp(-1)


def best_ages(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of the blocks with the `count` highest scores, in any order; among equal scores the newer block."""
    if count == len(ages):
        return ages.expand(*scores.shape[:-1], count)
    if scores.device.type != "cpu" and scores.dtype == torch.float32:  # reading `tied` would stall the device
        return _top_packed(scores, ages, count)
    values, indices = _highest(scores, count + 1)
    best = ages[indices[..., :count]]
    tied = values[..., -1] == values[..., -2]  # a tie matters only between the last score taken and the first one left
    if bool(tied.any()):
        best[tied] = _newer(scores[tied], values[tied][..., -1:], ages, count)
    return best


def _top_packed(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """`best_ages` of float32 scores in one pass, which reads nothing on the CPU: integers have the order of the pairs.

    The high half of each integer is the score, the low half the recency. The bits of a float, read as an integer, have
    its order; those of negative ones are turned round.
    """
    bits = (scores + 0.0).view(torch.int32)  # −0 becomes 0
    bits = (bits ^ ((bits >> 31) & YOUNGEST)).to(torch.int64)
    return YOUNGEST - (_highest((bits << 32) | (YOUNGEST - ages), count)[0] & YOUNGEST)


def _newer(scores: Tensor, edge: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of `count` blocks: all with a score above `edge`, and the newest of those with exactly this score."""
    rank = torch.where(scores > edge, 0, torch.where(scores == edge, ages, ages.shape[0] + 1))
    return ages[rank.topk(count, dim=-1, largest=False).indices]


def _highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` in two passes: the highest scores are in the groups of scores with the highest maxima."""
    if scores.device.type == "cpu" and scores.numel() <= FEW:
        return scores.topk(count, dim=-1)
    group = GROUP
    if scores.device.type == "cpu":  # so that both passes are short
        group = max(1, min(GROUP, math.isqrt(scores.shape[-1] // (2 * count))))
    columns = scores.shape[-1] // group
    if columns <= count:
        return scores.topk(count, dim=-1)
    grouped = scores[..., : columns * group].unflatten(-1, (group, columns))
    chosen = grouped.amax(-2).topk(count, dim=-1, sorted=False).indices
    inside = (chosen[..., None] + torch.arange(0, columns * group, columns, device=scores.device)).flatten(-2)
    rest = torch.arange(columns * group, scores.shape[-1], device=scores.device).expand(*inside.shape[:-1], -1)
    candidates = torch.cat([inside, rest], -1)
    best = scores.gather(-1, candidates).topk(count, dim=-1)
    return best.values, candidates.gather(-1, best.indices)
