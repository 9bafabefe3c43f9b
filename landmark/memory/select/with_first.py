"""The blocks that begin the text are always among those that a query reads: much of the attention goes to them.

A pretrained model puts the weight that it has no use for on the first tokens of a text, its attention sinks (Xiao et
al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from landmark.memory.question import Question
from landmark.memory.select.selector import Around, Choice, Selector


@dataclass(frozen=True)
class WithFirst(Around):
    """Of the k blocks, `count` are the first of the text, unless they were dropped; inner: ranks blocks by scores."""

    count: int
    inner: Selector

    def choose(self, question: Question) -> Choice:
        return self.inner.choose(replace(question, first=self.count))
