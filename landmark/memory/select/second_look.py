"""A second look at the best blocks: of those with the best landmarks, the ones with the best landmark and tokens.

A landmark's key says of a block what fits into d numbers; what a query finds in it, the keys of its tokens say. So

1. landmarks propose m blocks,
2. and of these a query reads the k with the largest

    s_b + log Σ_j exp s_j,        s_b the score of block b's landmark, s_j of its tokens j,

the weight that the block would have if the landmark were a bias of its tokens' scores. It scores m·ℓ keys for that,
whatever the length of the text. Where heads choose together, scores are logs of shares of what is proposed to them, and
the best of these counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from landmark.attention import Grouped
from landmark.attention.fused.block_scores import score_blocks
from landmark.memory.query_tiles import QueryTiles
from landmark.memory.question import Question
from landmark.memory.select.selector import Around, Choice, Selector
from landmark.memory.shared_blocks import weights_of_shared


@dataclass(frozen=True)
class SecondLook(Around):
    """Chooses among the `proposed` blocks of inner, whose queries choose by themselves ("per_token_and_…")."""

    proposed: int
    inner: Selector

    def choose(self, question: Question) -> Choice:
        if min(self.proposed, len(question.store)) <= question.k:
            return self.inner.choose(replace(question, k=self.proposed))
        choice = self.inner.choose(replace(question, k=self.proposed))
        scores = _scores(question, choice.ages)
        if choice.ages.shape[1] < scores.shape[1]:
            scores = _shares(scores, choice.ages.shape[1])
        scores = question.preferred(scores, choice.ages)
        # From the newest block on, so that a stable sort decides ties.
        best = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., : question.k]
        best = (scores.shape[-1] - 1 - best).sort(-1).values
        return Choice(choice.ages.gather(-1, best))


@torch.no_grad()
def _scores(question: Question, ages: Tensor) -> Tensor:
    """s_b + log Σ_j exp s_j of each query and block proposed to it, (B, H, n, m), at the lags of scoring.

    ages: (B, H or H_kv, n, m), of the proposed blocks.
    """
    store, lags = question.store, question.lags.scoring(ages)
    queries = question.queries.rounded.detach()
    selected = None if question.selection is None else question.selection.selected
    selected = None if ages.shape[1] < queries.shape[3] else selected  # all heads of a group help to choose
    if question.backend == "triton" and selected is None and (blocks := store.in_place(ages.numel())) is not None:
        return score_blocks(queries, blocks[0], store.landmarks, ages, lags, added=store.added)
    if ages.shape[2] == 1 and selected is None:
        return weights_of_shared(queries, store, ages, lags, question.softcap)
    tiles = QueryTiles(queries, store, ages, lags, selected, question.softcap)
    scores = tiles.empty(dtype=store.landmarks.dtype)
    for part in tiles.parts():
        scores[part.tiles] = tiles.split(
            tiles.gates(part, Grouped(1.0))
        )  # whatever the memory's gate is: the best matches
    return tiles.of_queries(scores)[..., 0]


def _shares(scores: Tensor, choosing: int) -> Tensor:
    """Logs of shares of what is proposed, of scores (B, H, n, m): the highest of those who choose together.

    choosing: heads, or groups, that choose by themselves. Returns (B, choosing, n, m).
    """
    return scores.log_softmax(-1).unflatten(1, (choosing, -1)).amax(2)
