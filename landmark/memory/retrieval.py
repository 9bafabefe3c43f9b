"""Which blocks a query reads: score, reduce to the granularity, take the top k (paper, Sections 3.2 and 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.memory.positions import scoring_lag
from landmark.memory.store import BlockStore

GRANULARITIES = ("per_token_and_head", "per_head", "per_token")
SCORERS = ("landmark", "recent", "random", "mean_key")


def retrieve(
    turned: Tensor,
    store: BlockStore,
    *,
    k: int,
    granularity: str,
    scorer: str,
    tie: bool,
    generator: torch.Generator,
) -> Tensor:
    """Ages of the retrieved blocks, oldest first.

    turned: (S, B, T, H, d), queries turned for lag 1…S. tie: the blocks older than the last k have one score by
    construction (layer 0, whose landmarks are all the same vector). generator: for the scorer `random`.

    Returns int64 (B, H, T, q), q = min(k, blocks kept), with T = 1 for `per_head` and H = 1 for `per_token`. Among
    blocks with exactly equal scores the newer are taken.
    """
    _, batch, queries, heads, _ = turned.shape
    count = min(k, len(store))
    if scorer == "recent":
        ages = torch.arange(count, 0, -1, device=turned.device)
        return ages.expand(batch, 1 if granularity == "per_token" else heads, _rows(granularity, queries), count)
    if scorer == "random":
        shape = (batch, 1 if granularity == "per_token" else heads, _rows(granularity, queries), len(store))
        ages = store.ages()
        scores = torch.rand(shape, generator=generator, device=turned.device)
    else:
        summaries = store.means if scorer == "mean_key" else store.landmarks
        scores, ages, normaliser = _scores(turned, summaries, store, k, tie and scorer == "landmark")
        if granularity == "per_head":
            scores = (scores - normaliser[..., None]).amax(2, keepdim=True)
        elif granularity == "per_token":
            scores = (scores - normaliser[..., None]).amax(1, keepdim=True)
    return _top(scores, ages, count).sort(-1, descending=True).values


def _rows(granularity: str, queries: int) -> int:
    return 1 if granularity == "per_head" else queries


def _scores(turned: Tensor, summaries: Tensor, store: BlockStore, k: int, tie: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (B, H, T, n) of candidate blocks, their ages (n,), and the log of the softmax's normaliser (B, H, T).

    The scale 1/√d is left to the caller's `turned`. The normaliser counts every block kept. Reducing log-probabilities
    ranks as reducing probabilities does, without underflow.
    """
    slots, queries, heads = turned.shape[0], turned.shape[2], turned.shape[3]
    group = heads // summaries.shape[1]
    recent = min(k, len(store))
    older = len(store) - recent
    recent_ages = torch.arange(1, recent + 1, device=turned.device)

    def against(ages: Tensor, turned_queries: str, queries_at: Tensor) -> Tensor:
        keys = summaries[:, :, store.rows(ages)].repeat_interleave(group, 1)
        return torch.einsum(f"{turned_queries},bhnd->bhtn", queries_at, keys)

    lag = scoring_lag(recent_ages, k, slots)
    scores = against(recent_ages, "nbthd", turned[lag - 1])
    if not older:
        return scores, recent_ages, scores.logsumexp(-1)
    if tie:
        ages = torch.arange(recent + 1, recent + 1 + min(older, max(k, 1)), device=turned.device)
        shared = against(ages[:1], "bthd", turned[-1])
        normaliser = torch.cat([scores, shared + torch.log(torch.tensor(float(older)))], -1).logsumexp(-1)
        return (
            torch.cat([scores, shared.expand(-1, -1, -1, len(ages))], -1),
            torch.cat([recent_ages, ages]),
            normaliser,
        )
    keys = summaries[:, :, : len(store)]
    scan = turned[-1].permute(0, 2, 3, 1).reshape(len(keys), keys.shape[1], group, -1, queries)
    everything = torch.einsum("bkgdt,bknd->bkgtn", scan, keys).reshape(len(keys), heads, queries, -1)
    everything[..., store.rows(recent_ages)] = scores
    return everything, store.ages(), everything.logsumexp(-1)


def _top(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of the `count` highest scores; which of several exactly equal ones only matters at the edge."""
    candidates = scores.shape[-1]
    if count == candidates:
        return ages.expand(*scores.shape[:-1], count)
    best = scores.topk(count + 1, dim=-1)
    if bool((best.values[..., -1] == best.values[..., -2]).any()):
        newest_first = ages.argsort()
        order = torch.sort(scores[..., newest_first], dim=-1, descending=True, stable=True).indices
        return ages[newest_first][order[..., :count]]
    return ages[best.indices[..., :count]]
