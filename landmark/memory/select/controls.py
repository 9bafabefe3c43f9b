"""Controls: the newest blocks, random ones, and those that are named beforehand. A memory helps where it beats them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.memory.layer import Question
from landmark.memory.select.scores import best_ages, newest_ages
from landmark.memory.select.selector import Selector


@dataclass(frozen=True)
class Newest(Selector):
    """All queries read the k newest blocks."""

    granularity: str = "per_token_and_head"

    def choose(self, question: Question, k: int) -> Tensor:
        return newest_ages(question, k, self.granularity)


@dataclass(frozen=True)
class Random(Selector):
    """Each set of queries and heads reads k blocks, other ones in every layer and chunk. seed: of the numbers."""

    granularity: str = "per_token_and_head"
    seed: int = 0

    def choose(self, question: Question, k: int) -> Tensor:
        store, device = question.store, question.q.device
        if k >= len(store):
            return newest_ages(question, k, self.granularity)
        seed = hash((self.seed, question.position, question.layer)) & 0x7FFF_FFFF
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.rand(*question.sets(self.granularity), len(store), generator=generator, device=device)
        return best_ages(scores, store.ages(), k).sort(-1, descending=True).values


@dataclass
class Given(Selector):
    """All queries of a sample read the same blocks: those named, the newest first, then the newest others.

    numbers: (B, n), of these blocks in the text, from 0; those that are not stored do not count. None: they are set
    before the first retrieval.
    """

    granularity: str = "per_token_and_head"
    numbers: Tensor | None = None

    def choose(self, question: Question, k: int) -> Tensor:
        """Raises RuntimeError where no numbers are set."""
        if self.numbers is None:
            raise RuntimeError("select=Given(): set its `numbers`, those of the blocks, first")
        store = question.store
        ages, count = store.ages(), min(k, len(store))
        given = (store.added - self.numbers).to(ages.device)
        is_given = (given[:, :, None] == ages).any(1).float()
        chosen = best_ages(is_given, ages, count).sort(-1, descending=True).values
        return chosen[:, None, None].expand(*question.sets(self.granularity), count)
