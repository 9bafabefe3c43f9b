"""A cutoff of the context miss token (CMT): where its weight is below, a query reads nothing (paper, Appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from landmark.memory.query_selection import QuerySelection
from landmark.memory.question import Question
from landmark.memory.select.selector import Around, Choice, Selector
from landmark.memory.settings import choosing_heads


@dataclass(frozen=True)
class Cutoff(Around):
    """Asks `inner` for the queries whose weight of the context miss token is at least the cutoff.

    cutoff: 0…1, one number or one for each layer.
    """

    cutoff: float | Sequence[float]
    inner: Selector

    def choose(self, question: Question) -> Choice:
        if question.selection is None:  # there is no such token
            return self.inner.choose(question)
        cutoff = self.cutoff[question.layer] if isinstance(self.cutoff, Sequence) else self.cutoff
        weight = question.selection.cmt_weight
        selection = select_queries(weight, cutoff, self.granularity, question.store.kv_heads)
        narrowed = question.of(selection)
        if selection.is_empty:
            return Choice(weight.new_empty(*weight.shape[:2], 0, 0).long(), question=narrowed)
        return replace(self.inner.choose(narrowed), question=narrowed)


def select_queries(cmt_weight: Tensor, cutoff: float, granularity: str, kv_heads: int) -> QuerySelection:
    """Select the queries with a weight of at least the cutoff.

    With "per_head" all queries of a chunk choose together: all are selected if one retrieves. With "per_token" all
    heads choose together: a query is selected if it retrieves in one head; with "per_token_and_group" the heads that
    share keys do. With a cutoff of 0 all retrieve, and the weights are not read.

    Args:
        cmt_weight: (B, H, T).
        cutoff: 0…1.
        granularity: as in `landmark.memory.select.Best`.
        kv_heads: H_kv.
    """
    retrieves = cmt_weight >= cutoff
    if cutoff == 0:
        return QuerySelection(cmt_weight, retrieves)
    heads = retrieves.shape[1]
    choosing = choosing_heads(granularity, heads, kv_heads)
    searched = retrieves.unflatten(1, (choosing, -1)).any(2)
    if choosing > 1:
        searched = searched.repeat_interleave(heads // choosing, 1)
    count = int(searched.sum(-1).max())
    if granularity == "per_head" and count:
        count = retrieves.shape[2]
    indices = None
    if count < searched.shape[2]:
        indices = searched.sort(dim=2, descending=True, stable=True).indices[..., :count]
    selected = QuerySelection(cmt_weight, retrieves, indices).gather(retrieves)
    return QuerySelection(cmt_weight, retrieves, indices, selected)
