"""Selectors that need no training of their own: by mean keys, and by a second look at the tokens of the best blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from landmark.memory.block_attention import Pairs, weights_of_blocks
from landmark.memory.layer import Question
from landmark.memory.select.scores import best_of_summaries, preferring
from landmark.memory.select.selector import Selector
from landmark.memory.store.block_store import Summary, mean_keys


@dataclass(frozen=True)
class MeanKeys(Selector):
    """Reads the k blocks whose mean key has the highest score, as MoBA and InfLLM do; as an ablation of landmarks."""

    granularity: str = "per_token_and_head"
    newest: int = 0
    summaries = MappingProxyType({"means": mean_keys})

    def choose(self, question: Question, k: int) -> Tensor:
        return best_of_summaries(question, k, question.store.summaries["means"], self.granularity, self.newest)


@dataclass(frozen=True)
class SecondLook(Selector):
    """A second look at the `proposed` best blocks of `inner`, whose queries choose by themselves ("per_token_and_…").

    A landmark's key says of a block what fits into d numbers; the keys of its tokens say what a query finds in it. So
    a query reads, of the blocks that landmarks propose, the k with the largest

        s_b + log Σ_j exp s_j,        s_b the score of block b's landmark, s_j of its tokens j,

    the weight that the block would have if the landmark were a bias of its tokens' scores. It scores m·ℓ keys for that,
    whatever the length of the text. Where heads choose together, scores are logs of shares of what is proposed to them,
    and the best of these counts.
    """

    proposed: int
    inner: Selector

    @property
    def granularity(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.granularity

    @property
    def newest(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.newest

    @property
    def summaries(self) -> Mapping[str, Summary]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.summaries

    def check_samples_can_be_selected(self) -> None:
        self.inner.check_samples_can_be_selected()

    def choose(self, question: Question, k: int) -> Tensor:
        ages = self.inner.choose(question, self.proposed)
        if ages.shape[-1] <= k:
            return ages
        scores = _weights(question, ages)
        if ages.shape[1] < scores.shape[1]:  # shares, of which the highest of the heads that choose together counts
            scores = scores.log_softmax(-1).unflatten(1, (ages.shape[1], -1)).amax(2)
        scores = preferring(scores, ages, self.newest)
        # From the newest block on, so that a stable sort decides ties.
        best = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return ages.gather(-1, (scores.shape[-1] - 1 - best).sort(-1).values)


@torch.no_grad()
def _weights(question: Question, ages: Tensor) -> Tensor:
    """s_b + log Σ_j exp s_j of each query and block proposed to it, (B, H, n, m), at the lags of scoring.

    ages: (B, H or H_kv, n, m), of the proposed blocks.
    """
    store, lags, queries = question.store, question.lags.scoring(ages), question.rounded.detach()
    selected = None if ages.shape[1] < queries.shape[3] else question.selected  # all heads of a group help to choose
    return weights_of_blocks(Pairs(queries, store, ages, lags, question.softcap, selected))
