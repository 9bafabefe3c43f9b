"""The cutoff of the context miss token (CMT): which queries retrieve (paper, Appendix D).

The token's weight S is known before retrieval. It is the share of a query's attention that retrieved blocks get. Where
S is below the cutoff the query retrieves nothing, and this share is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from landmark.memory.settings import choosing_heads


@dataclass(frozen=True)
class QuerySelection:
    """The queries of a chunk that retrieve.

    cmt_weight: (B, H, T), S. retrieves: (B, H, T), bool, whether S is at least the cutoff.
    indices: (B, H or 1, n), the selected queries. A head in which fewer than n queries retrieve gets other queries
        besides. None: all T queries.
    selected: (B, H, n), bool, `retrieves` at the indices. None: all retrieve.
    """

    cmt_weight: Tensor
    retrieves: Tensor
    indices: Tensor | None = None
    selected: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        """The part of the selected queries: (B, H, T, …) → (B, H, n, …)."""
        return x if self.indices is None else x.gather(2, self._index(x))

    def scatter_add(self, out: Tensor, x: Tensor) -> Tensor:
        """out (B, H, T, d) with x (B, H, n, d) added at the selected queries."""
        return out + x if self.indices is None else out.scatter_add(2, self._index(x, out.shape[1]), x)

    def _index(self, x: Tensor, heads: int | None = None) -> Tensor:
        assert self.indices is not None
        index = self.indices.expand(-1, heads or x.shape[1], -1)
        return index.view(*index.shape, *[1] * (x.ndim - 3)).expand(*index.shape, *x.shape[3:])

    def mask_ages(self, ages: Tensor) -> Tensor:
        """Ages (B, H, H_kv or 1, n or 1, q) of retrieved blocks, 0 where no query that retrieves uses them."""
        if self.selected is None:
            return ages
        read = self.selected.unflatten(1, (ages.shape[1], -1)).any(2)
        return ages * (read.any(2, keepdim=True) if ages.shape[2] == 1 else read)[..., None]

    @property
    def is_empty(self) -> bool:
        return self.indices is not None and self.indices.shape[2] == 0


def select_queries(cmt_weight: Tensor, cutoff: float, granularity: str, kv_heads: int) -> QuerySelection:
    """Select the queries with a weight of at least the cutoff.

    With "per_head" all queries of a chunk choose together: all are selected if one retrieves. With "per_token" all
    heads choose together: a query is selected if it retrieves in one head; with "per_token_and_group" the heads that
    share keys do. With a cutoff of 0 all retrieve, and the weights are not read.

    Args:
        cmt_weight: (B, H, T).
        cutoff: 0…1.
        granularity: as in `landmark.memory.Memory`.
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
