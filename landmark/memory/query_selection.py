"""Queries of a chunk that retrieve, where a context miss token (CMT) lets some do without (paper, Appendix D).

The token's weight S is known before retrieval. It is the share of a query's attention that retrieved blocks get. Where
S is below a cutoff (select/cutoff.py) the query retrieves nothing, and this share is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
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
        return x if self.indices is None else x.gather(2, self._index(x, x.shape[1]))

    def scatter_add(self, out: Tensor, x: Tensor) -> Tensor:
        """out (B, H, T, d) with x (B, H, n, d) added at the selected queries."""
        return out + x if self.indices is None else out.scatter_add(2, self._index(x, out.shape[1]), x)

    def _index(self, x: Tensor, heads: int) -> Tensor:
        """The indices for each of `heads` heads, or of the groups of heads that choose together."""
        assert self.indices is not None
        index = self.indices[:, :: max(1, self.indices.shape[1] // heads)].expand(-1, heads, -1)
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
