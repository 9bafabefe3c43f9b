"""The blocks with the best landmarks: the paper's retrieval (Sections 3.2 and 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from landmark.memory.question import Question
from landmark.memory.select.scores import best_of_summaries
from landmark.memory.select.selector import Choice, Selector


@dataclass(frozen=True)
class Best(Selector):
    """Reads the k blocks whose landmark has the highest score.

    granularity: "per_token_and_head": each query of each head has its own set of retrieved blocks;
        "per_token_and_group": the heads that share keys share a set; "per_token": all heads share a set; "per_head":
        the queries of a chunk share a set.
    tied_layers: layers in which all landmarks are the same vector up to rounding, so that all blocks older than the
        last k have the same score; there the newer ones are taken. With stingy positions only, which make it so.
    """

    granularity: str = "per_token_and_head"
    tied_layers: tuple[int, ...] = (0,)

    def is_tied(self, question: Question) -> bool:
        """Whether all older blocks have the same score."""
        return question.layer in self.tied_layers and question.lags.own > 0

    def choose(self, question: Question) -> Choice:
        ages = best_of_summaries(question, self.granularity, question.store.landmarks, self.is_tied(question))
        return Choice(ages)
