"""The newest blocks, as an ablation: a memory helps where it does better than the last k blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from landmark.memory.question import Question
from landmark.memory.select.selector import Choice, Selector


@dataclass(frozen=True)
class Newest(Selector):
    """All queries read the k newest blocks."""

    granularity: str = "per_token_and_head"

    def choose(self, question: Question) -> Choice:
        count = min(question.k, len(question.store))
        ages = torch.arange(count, 0, -1, device=question.exact.device)
        return Choice(ages.expand(*question.sets(self.granularity), count))
