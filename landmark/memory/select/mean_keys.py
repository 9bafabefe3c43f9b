"""The blocks with the best mean keys, as an ablation: MoBA and InfLLM rank blocks so, without landmarks."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from landmark.memory.question import Question
from landmark.memory.select.scores import best_of_summaries
from landmark.memory.select.selector import Choice, Selector
from landmark.memory.store.block_store import mean_keys


@dataclass(frozen=True)
class MeanKeys(Selector):
    """Reads the k blocks whose mean key has the highest score."""

    granularity: str = "per_token_and_head"
    summaries = MappingProxyType({"means": mean_keys})

    def choose(self, question: Question) -> Choice:
        return Choice(best_of_summaries(question, self.granularity, question.store.summaries["means"]))
