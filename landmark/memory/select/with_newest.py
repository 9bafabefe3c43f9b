"""The newest blocks are always among those that a query reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from landmark.memory.question import Question
from landmark.memory.select.selector import Around, Choice, Selector


@dataclass(frozen=True)
class WithNewest(Around):
    """Of the k blocks, `count` are the newest; inner: ranks blocks by scores."""

    count: int
    inner: Selector

    def choose(self, question: Question) -> Choice:
        return self.inner.choose(replace(question, newest=self.count))
