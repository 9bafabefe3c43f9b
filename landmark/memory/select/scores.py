"""The blocks whose summary, a landmark's key or a mean key, has the best score (paper, Sections 3.2 and 4.1).

1. Score every query against the summary of every block, both at their positions of scoring (positions.py).
2. Where queries or heads choose together, take the softmax of each one's scores over the blocks, and of these
   probabilities the maximum.
3. Choose the k blocks with the highest scores (top_k.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from landmark.attention.fused.top_k_landmarks import MOST, TILE, top_k_landmarks
from landmark.attention.scoring import capped, capped_in_place
from landmark.memory.question import Question
from landmark.memory.select.top_k import best_ages

SCORED_AT_ONCE = {"cpu": 1 << 21}  # by device: scores computed together; on the CPU they fit into its cache
SCORED_ELSEWHERE = 1 << 27


def scored_at_once(device: torch.device) -> int:
    """How many scores a device computes together: on the CPU as many as fit into its cache."""
    return SCORED_AT_ONCE.get(device.type, SCORED_ELSEWHERE)


def best_of_summaries(question: Question, granularity: str, summaries: Tensor, is_tied: bool = False) -> Tensor:
    """The ages of the chosen blocks, as in `landmark.memory.select.Choice`.

    Args:
        question: what is asked.
        granularity: as in `landmark.memory.select.Best`.
        summaries: (B, H_kv, capacity, d), of the blocks.
        is_tied: whether all blocks without a lag of their own get one and the same score.
    """
    store, queries = question.store, question.exact
    count, sets = min(question.k, len(store)), question.sets(granularity)
    if count == len(store):
        return torch.arange(count, 0, -1, device=queries.device).expand(*sets, count)
    alone = granularity == "per_token_and_head" and not question.newest + question.first
    has_kernel = alone and question.softcap is None and summaries.dtype == torch.float32
    few = count <= MOST and not (is_tied and count + question.lags.own > TILE)
    if question.backend == "triton" and has_kernel and few:
        of_store = {"added": store.added, "recent": question.lags.own}
        return top_k_landmarks(queries, summaries, **of_store, k=count, tied=is_tied)
    chosen = torch.empty(*sets, count, dtype=torch.int64, device=queries.device)
    group, buffer = queries.shape[3] // summaries.shape[1], queries.new_empty(0)
    for kv, part in _parts(question, granularity, summaries.shape[1]):
        of_heads = slice(kv.start * group, kv.stop * group)
        q = queries[:, :, part, of_heads]
        size = q[0, ..., 0].numel() * len(store)
        buffer = buffer if buffer.numel() >= size else queries.new_empty(size)  # allocating memory is slow
        scores, ages, normaliser = _scores(question, q, summaries[:, kv], count if is_tied else 0, buffer[:size])
        if granularity != "per_token_and_head":
            # The maximum of log-probabilities ranks as that of probabilities, without underflow.
            scores = scores - normaliser()[..., None]
        if granularity == "per_head":
            scores, part = scores.amax(2, keepdim=True), slice(None)
        elif granularity != "per_token_and_head":
            of_heads = kv if granularity == "per_token_and_group" else slice(0, 1)
            scores = scores.unflatten(1, (of_heads.stop - of_heads.start, -1)).amax(2)
        chosen[:, of_heads, part] = best_ages(question.preferred(scores, ages), ages, count)
    return chosen.sort(-1, descending=True).values


def _parts(question: Question, granularity: str, kv_heads: int) -> Iterator[tuple[slice, slice]]:
    """Slices of key/value heads and of queries to score together; those that choose together are not parted."""
    _, batch, queries, heads, _ = (exact := question.queries.exact).shape
    of_one = batch * (heads // kv_heads) * len(question.store)  # scores of one key/value head and one query
    room = scored_at_once(exact.device) // of_one
    of_heads, of_queries = max(1, min(kv_heads, room // queries)), max(1, min(queries, room // kv_heads))
    if granularity == "per_head":
        of_queries = queries
    else:
        of_heads = kv_heads
    for head in range(0, kv_heads, of_heads):
        for query in range(0, queries, of_queries):
            yield slice(head, min(head + of_heads, kv_heads)), slice(query, min(query + of_queries, queries))


def _scores(
    question: Question, queries: Tensor, summaries: Tensor, tied: int, buffer: Tensor
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Scores (B, H, T, n) of n blocks, their ages (n,), and a function for the log-sum-exp over all blocks.

    Args:
        question: what is asked.
        queries: (S, B, T, H, d), of those that are asked, rotated for lag 1…S.
        summaries: (B, H_kv, capacity, d), of their heads.
        tied: if blocks without a lag of their own share one score, how many of them, the newest, are among the n; 0 if
            each has its own.
        buffer: memory for the scores.

    The function returns (B, H, T).
    """
    store, cap = question.store, question.softcap
    heads, group = queries.shape[3], queries.shape[3] // summaries.shape[1]
    own = min(question.lags.own, len(store))
    lagged = queries[:own].flip(0)  # for blocks with a lag of their own, the oldest of them first

    def against(rows: Tensor | slice, dimensions: str, q: Tensor) -> Tensor:
        keys = summaries[:, :, rows]
        keys = keys if group == 1 else keys.repeat_interleave(group, 1)
        return capped(torch.einsum(f"{dimensions},bhnd->bhtn", q, keys), cap)

    if tied:
        older = len(store) - own
        same = min(older, tied)
        ages = torch.arange(own + same, 0, -1, device=queries.device)
        shared = against(store.rows(ages[same - 1 : same]), "bthd", queries[-1])
        scores = against(store.rows(ages[same:]), "nbthd", lagged)
        every = torch.cat([shared + math.log(older), scores], -1)
        return torch.cat([shared.expand(-1, -1, -1, same), scores], -1), ages, lambda: every.logsumexp(-1)
    keys = summaries[:, :, : len(store)]
    scan = queries[-1].transpose(1, 2).reshape(-1, group * queries.shape[2], keys.shape[-1])
    everything = buffer.view(len(scan), -1, keys.shape[2])
    everything = torch.bmm(scan, keys.flatten(0, 1).mT, out=everything).view(len(keys), heads, queries.shape[2], -1)
    capped_in_place(everything, cap)
    for rows, part in store.runs(store.added - own, own):
        everything[..., rows] = against(rows, "nbthd", lagged[part])
    return everything, store.ages(), lambda: everything.logsumexp(-1)
