"""Blocks that are named beforehand, as an ablation: what a reader does that retrieves the right ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from landmark.memory.question import Question
from landmark.memory.select.selector import Choice, Selector
from landmark.memory.select.top_k import best_ages


@dataclass
class Given(Selector):
    """All queries of a sample read the same blocks: those named, the newest first, then the newest others.

    numbers: (B, n), of these blocks in the text, from 0; those that are not stored do not count. None: they are set
    before the first retrieval.
    """

    granularity: str = "per_token_and_head"
    numbers: Tensor | None = None

    def choose(self, question: Question) -> Choice:
        """Raises RuntimeError where no numbers are set."""
        if self.numbers is None:
            raise RuntimeError("select=Given(): set its `numbers`, those of the blocks, first")
        store = question.store
        ages, count = store.ages(), min(question.k, len(store))
        given = (store.added - self.numbers).to(ages.device)
        is_given = (given[:, :, None] == ages).any(1).float()
        chosen = best_ages(is_given, ages, count).sort(-1, descending=True).values
        return Choice(chosen[:, None, None].expand(*question.sets(self.granularity), count))
