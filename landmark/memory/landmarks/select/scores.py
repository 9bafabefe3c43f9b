"""Scores of queries and blocks, and the blocks with the highest (paper, Sections 3.2 and 4.1).

1. Score every query against the summary of every block, a landmark's key or a mean key, both at their positions of
   scoring (`landmark.memory.landmarks.layer`).
2. Where queries or heads choose together, take the softmax of each one's scores over the blocks, and of these
   probabilities the maximum.
3. Choose the k blocks with the highest scores; among equal scores the newer ones.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from landmark.attention.fused.tuning import LANDMARKS, MOST_BLOCKS
from landmark.attention.scoring import capped, capped_in_place
from landmark.memory.landmarks.layer import Question

SCORED_AT_ONCE = {"cpu": 1 << 21}  # by device: scores computed together; on the CPU they fit into its cache
SCORED_ELSEWHERE = 1 << 27


def newest_ages(question: Question, k: int, granularity: str) -> Tensor:
    """The ages of the k newest blocks, as a selector returns them."""
    count = min(k, len(question.store))
    ages = torch.arange(count, 0, -1, device=question.q.device)
    return ages.expand(*question.sets(granularity), count)


def best_of_summaries(question: Question, k: int, summaries: Tensor, granularity: str, is_tied: bool = False) -> Tensor:
    """The ages of the k best blocks, as a selector returns them.

    summaries: (B, H_kv, capacity, d). is_tied: whether all blocks without a lag of their own have the same score.
    """
    store, queries = question.store, question.exact
    count, sets = min(k, len(store)), question.sets(granularity)
    if count == len(store):
        return newest_ages(question, k, granularity)
    has_kernel = granularity == "per_token_and_head" and question.softcap is None and summaries.dtype == torch.float32
    few = count <= MOST_BLOCKS and not (is_tied and count + question.lags.own > LANDMARKS)
    if question.backend == "triton" and has_kernel and few:
        from landmark.memory.landmarks.select.scores_kernels import top_k_landmarks

        stored = {"added": store.added, "recent": question.lags.own}
        return top_k_landmarks(queries, summaries, **stored, k=count, tied=is_tied)
    chosen = torch.empty(*sets, count, dtype=torch.int64, device=queries.device)
    group, buffer = queries.shape[3] // summaries.shape[1], queries.new_empty(0)
    for kv, part in _parts(question, granularity, summaries.shape[1]):
        chosen_heads = slice(kv.start * group, kv.stop * group)
        q = queries[:, :, part, chosen_heads]
        size = q[0, ..., 0].numel() * len(store)
        buffer = buffer if buffer.numel() >= size else queries.new_empty(size)  # allocating memory is slow
        scores, ages, normaliser = scores_of_blocks(
            question, q, summaries[:, kv], count if is_tied else 0, buffer[:size]
        )
        if granularity != "per_token_and_head":
            # The maximum of log-probabilities ranks as that of probabilities, without underflow.
            scores = scores - normaliser()[..., None]
        if granularity == "per_head":
            scores, part = scores.amax(2, keepdim=True), slice(None)
        elif granularity != "per_token_and_head":
            chosen_heads = kv if granularity == "per_token_and_group" else slice(0, 1)
            scores = scores.unflatten(1, (chosen_heads.stop - chosen_heads.start, -1)).amax(2)
        chosen[:, chosen_heads, part] = best_ages(scores, ages, count)
    return chosen.sort(-1, descending=True).values


def scores_of(queries: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """Scores (B, H, T, n) of n blocks with keys (B, H_kv, n, d).

    queries: (n, B, T, H, d), rotated for the lag of each block; or (B, T, H, d), where they have one lag.
    """
    group = queries.shape[-2] // keys.shape[1]
    keys = keys if group == 1 else keys.repeat_interleave(group, 1)
    lagged = "nbthd" if queries.ndim == 5 else "bthd"
    return capped(torch.einsum(f"{lagged},bhnd->bhtn", queries, keys), softcap)


def _parts(question: Question, granularity: str, kv_heads: int) -> Iterator[tuple[slice, slice]]:
    """Slices of key/value heads and of queries to score together; those that choose together are not parted."""
    _, batch, queries, heads, _ = (exact := question.exact).shape
    scores_per_query = batch * (heads // kv_heads) * len(question.store)  # scores of one key/value head and one query
    room = SCORED_AT_ONCE.get(exact.device.type, SCORED_ELSEWHERE) // scores_per_query
    head_step, query_step = kv_heads, max(1, min(queries, room // kv_heads))
    if granularity == "per_head":
        head_step, query_step = max(1, min(kv_heads, room // queries)), queries
    for head in range(0, kv_heads, head_step):
        for query in range(0, queries, query_step):
            yield slice(head, min(head + head_step, kv_heads)), slice(query, min(query + query_step, queries))


def scores_of_blocks(
    question: Question, queries: Tensor, summaries: Tensor, tied: int, buffer: Tensor | None = None
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Scores (B, H, T, n) of n blocks, their ages (n,), and a function for the log-sum-exp over all blocks, (B, H, T).

    queries: (S, B, T, H, d), rotated for lag 1…S. summaries: (B, H_kv, capacity, d), of their heads. tied: if blocks
    without a lag of their own share one score, how many of them, the newest, are among the n. buffer: for the scores.
    """
    store, cap, heads = question.store, question.softcap, queries.shape[3]
    own = min(question.lags.own, len(store))
    lagged = queries[:own].flip(0)  # for blocks with a lag of their own, the oldest of them first
    if tied:
        older = len(store) - own
        same = min(older, tied)
        ages = torch.arange(own + same, 0, -1, device=queries.device)
        shared = scores_of(queries[-1], summaries[:, :, store.rows(ages[same - 1 : same])], cap)
        scores = scores_of(lagged, summaries[:, :, store.rows(ages[same:])], cap)
        every = torch.cat([shared + math.log(older), scores], -1)
        return torch.cat([shared.expand(-1, -1, -1, same), scores], -1), ages, lambda: every.logsumexp(-1)
    keys = summaries[:, :, : len(store)]
    scan = queries[-1].transpose(1, 2).reshape(-1, heads // keys.shape[1] * queries.shape[2], keys.shape[-1])
    out = None if buffer is None else buffer.view(len(scan), -1, keys.shape[2])
    everything = torch.bmm(scan, keys.flatten(0, 1).mT, out=out).view(len(keys), heads, queries.shape[2], -1)
    capped_in_place(everything, cap)
    for rows, part in store.runs(store.added - own, own):
        everything[..., rows] = scores_of(lagged[part], summaries[:, :, rows], cap)
    return everything, store.ages(), lambda: everything.logsumexp(-1)


def best_ages(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of the blocks with the `count` highest scores, in any order; among equal scores the newer block."""
    if count == len(ages):
        return ages.expand(*scores.shape[:-1], count)
    values, indices = scores.topk(count + 1, dim=-1)
    edge = values[..., -1:]  # a tie matters only between the last score taken and the first one left
    if scores.device.type == "cpu" and not bool((values[..., -2:-1] == edge).any()):  # another device would wait
        return ages[indices[..., :count]]
    rank = torch.where(scores > edge, 0, torch.where(scores == edge, ages, len(ages) + 1))
    return ages[rank.topk(count, dim=-1, largest=False).indices]


def best_in_order(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages (…, count), oldest first, of the blocks with the highest scores (…, n); among equal scores the newer block.

    ages: (…, n), of the blocks, the newest first.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return ages.gather(-1, best).sort(-1, descending=True).values
