"""What all selectors have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from landmark.memory.question import Question
from landmark.memory.store.block_store import Summary


@dataclass(frozen=True, eq=False)
class Choice:
    """The blocks that the queries of a chunk read.

    ages: (B, H, H_kv or 1, n or 1, q), int64, of the blocks of each query, oldest first; 1 is the newest block. 1 where
        heads, or queries, choose together. q is the number of blocks to choose, or of those that there are.
    gates: (B, H, n, q), of these blocks, where choosing has computed them; None: it has not.
    question: that the choice answers, where only some of the queries read; None: the one that was asked.
    """

    ages: Tensor
    question: Question | None = None
    gates: Tensor | None = None


class Selector:
    """Chooses the blocks that the queries of a chunk read, in every layer.

    granularity: which queries and heads choose together (`landmark.memory.select.Best`). summaries: what a
    store must have of each block besides keys, values and landmark, and makes of its keys, by name.
    """

    granularity: str
    summaries: Mapping[str, Summary] = MappingProxyType({})

    def choose(self, question: Question) -> Choice:
        """The blocks for a chunk; there is at least one block. Among equal scores the newer blocks are chosen."""
        raise NotImplementedError

    def check_samples_can_be_selected(self) -> None:
        """Raise UserError where what the selector notes is of all samples of a batch together."""

    @property
    def innermost(self) -> Selector:
        """The selector inside all those that change its question."""
        return self


def _of_inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


class Around(Selector):
    """Changes a question, and asks the selector `inner`; the rest is as inner has it."""

    inner: Selector
    granularity = _of_inner("granularity")
    summaries = _of_inner("summaries")
    check_samples_can_be_selected = _of_inner("check_samples_can_be_selected")

    @property
    def innermost(self) -> Selector:
        return self.inner.innermost
