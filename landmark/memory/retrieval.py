"""Which blocks a query reads: score, reduce to the granularity, take the top k (paper, Sections 3.2 and 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from landmark.memory.block_store import BlockStore
from landmark.memory.positions import scoring_lag

GRANULARITIES = ("per_token_and_head", "per_head", "per_token")
SCORERS = ("landmark", "recent", "random", "mean_key")
SCANNED_AT_ONCE = {"cpu": 1 << 21}  # scores: what a cache holds
SCANNED_ELSEWHERE = 1 << 27
GROUP = 32  # scores


def retrieve(
    turned: Tensor,
    store: BlockStore,
    *,
    k: int,
    granularity: str,
    scorer: str,
    tie: bool,
    generator: torch.Generator,
    near: int | None = None,
) -> Tensor:
    """Ages of the retrieved blocks, oldest first.

    turned: (S, B, T, H, d), queries turned for lag 1…S. near: so many of the last blocks are scored at their own lag,
    all others at S (None: k, the stingy mapping). tie: the blocks older than the last k have one score by
    construction (layer 0, whose landmarks are all the same vector). generator: for the scorer `random`.

    Returns int64 (B, H, T, q), q = min(k, blocks kept), with T = 1 for `per_head` and H = 1 for `per_token`. Among
    blocks with exactly equal scores the newer are taken.
    """
    _, batch, queries, heads, _ = turned.shape
    count = min(k, len(store))
    shape = batch, 1 if granularity == "per_token" else heads, 1 if granularity == "per_head" else queries
    if scorer == "recent" or count == len(store):
        return torch.arange(count, 0, -1, device=turned.device).expand(*shape, count)
    if scorer == "random":
        scores = torch.rand(*shape, len(store), generator=generator, device=turned.device)
        return _top(scores, store.ages(), count).sort(-1, descending=True).values
    summaries = store.means if scorer == "mean_key" else store.landmarks
    retrieved = torch.empty(*shape, count, dtype=torch.int64, device=turned.device)
    group, work = heads // summaries.shape[1], turned.new_empty(0)
    for kv, at in _parts(summaries.shape[1], queries, batch * group * len(store), granularity, turned.device):
        of_heads = slice(kv.start * group, kv.stop * group)
        size = batch * (of_heads.stop - of_heads.start) * (at.stop - at.start) * len(store)
        work = work if work.numel() >= size else turned.new_empty(size)  # one place, for fresh memory is slow
        scores, ages, normaliser = _scores(
            turned[:, :, at, of_heads],
            summaries[:, kv],
            store,
            k if near is None else near,
            tie and scorer == "landmark",
            work[:size],
        )
        # Reducing log-probabilities ranks as reducing probabilities does, without underflow.
        if granularity == "per_head":
            scores, at = (scores - normaliser()[..., None]).amax(2, keepdim=True), slice(None)
        elif granularity == "per_token":
            scores, of_heads = (scores - normaliser()[..., None]).amax(1, keepdim=True), slice(None)
        retrieved[:, of_heads, at] = _top(scores, ages, count)
    return retrieved.sort(-1, descending=True).values


def _parts(
    heads: int, queries: int, scores: int, granularity: str, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Heads and queries to score at a time, where one of each takes so many scores: all that choose together."""
    room = SCANNED_AT_ONCE.get(device.type, SCANNED_ELSEWHERE) // scores
    of_heads, of_queries = max(1, min(heads, room // queries)), max(1, min(queries, room // heads))
    if granularity == "per_head":
        of_queries = queries
    else:
        of_heads = heads
    for head in range(0, heads, of_heads):
        for query in range(0, queries, of_queries):
            yield slice(head, min(head + of_heads, heads)), slice(query, min(query + of_queries, queries))


def _scores(
    turned: Tensor, summaries: Tensor, store: BlockStore, near: int, tie: bool, work: Tensor
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Scores (B, H, T, n) of candidate blocks, their ages (n,), and a function for the log of the softmax's
    normaliser (B, H, T), which counts every block kept. The scale 1/√d is left to the caller's `turned`."""
    slots, queries, heads = turned.shape[0], turned.shape[2], turned.shape[3]
    group = heads // summaries.shape[1]
    recent = min(near, len(store))
    older = len(store) - recent
    recent_ages = torch.arange(1, recent + 1, device=turned.device)

    def against(ages: Tensor, turned_queries: str, queries_at: Tensor) -> Tensor:
        keys = summaries[:, :, store.rows(ages)].repeat_interleave(group, 1)
        return torch.einsum(f"{turned_queries},bhnd->bhtn", queries_at, keys)

    lag = scoring_lag(recent_ages, near, slots)
    scores = against(recent_ages, "nbthd", turned[lag - 1])
    if tie:
        ages = torch.arange(recent + 1, recent + 1 + min(older, max(near, 1)), device=turned.device)
        shared = against(ages[:1], "bthd", turned[-1])
        all_older = shared + math.log(older)
        return (
            torch.cat([scores, shared.expand(-1, -1, -1, len(ages))], -1),
            torch.cat([recent_ages, ages]),
            lambda: torch.cat([scores, all_older], -1).logsumexp(-1),
        )
    keys = summaries[:, :, : len(store)]
    scan = turned[-1].transpose(1, 2).reshape(-1, group * queries, keys.shape[-1])
    everything = work.view(len(scan), -1, keys.shape[2])
    everything = torch.bmm(scan, keys.flatten(0, 1).mT, out=everything).view(len(keys), heads, queries, -1)
    everything[..., store.rows(recent_ages)] = scores
    return everything, store.ages(), lambda: everything.logsumexp(-1)


def _top(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of the `count` highest scores, unordered; among equal ones the newer."""
    if count == len(ages):
        return ages.expand(*scores.shape[:-1], count)
    values, indices = _highest(scores, count + 1)
    best = ages[indices[..., :count]]
    tied = values[..., -1] == values[..., -2]  # which of equal ones are taken only matters at the edge
    if scores.device.type != "cpu":  # looking would stall it
        newer = _newer(scores, values[..., -1:], ages, count)
        return torch.where(tied[..., None], newer, best)
    if bool(tied.any()):
        best[tied] = _newer(scores[tied], values[tied][..., -1:], ages, count)
    return best


def _newer(scores: Tensor, edge: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of `count` scores: all that are above the edge, and of those that equal it the newest."""
    rank = torch.where(scores > edge, 0, torch.where(scores == edge, ages, ages.shape[0] + 1))
    return ages[rank.topk(count, dim=-1, largest=False).indices]


def _highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk`, by way of the highest of every GROUP scores, among whose groups they must be."""
    columns = scores.shape[-1] // GROUP
    if columns <= count:
        return scores.topk(count, dim=-1)
    grouped = scores[..., : columns * GROUP].unflatten(-1, (GROUP, columns))
    chosen = grouped.amax(-2).topk(count, dim=-1, sorted=False).indices
    inside = (chosen[..., None] + torch.arange(0, columns * GROUP, columns, device=scores.device)).flatten(-2)
    rest = torch.arange(columns * GROUP, scores.shape[-1], device=scores.device).expand(*inside.shape[:-1], -1)
    candidates = torch.cat([inside, rest], -1)
    best = scores.gather(-1, candidates).topk(count, dim=-1)
    return best.values, candidates.gather(-1, best.indices)
