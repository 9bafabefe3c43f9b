"""Random blocks, as an ablation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from landmark.memory.question import Question
from landmark.memory.select.newest import Newest
from landmark.memory.select.selector import Choice, Selector
from landmark.memory.select.top_k import best_ages


@dataclass(frozen=True)
class Random(Selector):
    """Each set of queries and heads reads k blocks, other ones in every layer and chunk. seed: of the numbers."""

    granularity: str = "per_token_and_head"
    seed: int = 0

    def choose(self, question: Question) -> Choice:
        store, device = question.store, question.exact.device
        if question.k >= len(store):
            return Newest(self.granularity).choose(question)
        seed = hash((self.seed, question.position, question.layer)) & 0x7FFF_FFFF
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.rand(*question.sets(self.granularity), len(store), generator=generator, device=device)
        return Choice(best_ages(scores, store.ages(), question.k).sort(-1, descending=True).values)
