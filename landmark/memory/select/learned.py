"""The blocks with the best learned landmarks, of a pretrained model whose text has no landmark tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from landmark.attention.keys import Keys
from landmark.memory.question import Question
from landmark.memory.select.scores import best_of_summaries
from landmark.memory.select.selector import Choice, Selector, Summary


@dataclass(frozen=True)
class Learned(Selector):
    """Reads the k blocks whose learned landmark (landmark/memory/learned_landmarks.py) has the highest score.

    landmarks: of a layer's number, and of how the memory makes keys, what makes the landmarks of its blocks.
    """

    landmarks: Callable[[int, Keys], Summary]
    granularity: str = "per_token_and_head"

    def summaries(self, layer: int, keys: Keys) -> dict[str, Summary]:
        return {"learned": self.landmarks(layer, keys)}

    def choose(self, question: Question) -> Choice:
        return Choice(best_of_summaries(question, self.granularity, question.store.summaries["learned"]))
