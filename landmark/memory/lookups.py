"""Which queries look something up: those that the context miss token lets through (paper, Appendix D).

The token's weight S says, before anything is searched, how much of a query's attention what is remembered would get.
Where S is below a cutoff nothing is looked up, and S goes nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Lookups:
    """weight: (B, H, T), S. needed: (B, H, T), bool. at: (B, H or 1, n), the queries to search for, those of the heads
    that have fewer filled up with others; None: all T. reading: (B, H, n), which of them read; None: all do."""

    weight: Tensor
    needed: Tensor
    at: Tensor | None = None
    reading: Tensor | None = None

    def select(self, x: Tensor) -> Tensor:
        """What (B, H, T, …) holds of the queries to search for."""
        return x if self.at is None else x.gather(2, self._index(x))

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, H, T, d) with x, (B, H, n, d), added where it was selected."""
        return out + x if self.at is None else out.scatter_add(2, self._index(x, out.shape[1]), x)

    def _index(self, x: Tensor, heads: int | None = None) -> Tensor:
        assert self.at is not None
        index = self.at.expand(-1, heads or x.shape[1], -1)
        return index.view(*index.shape, *[1] * (x.ndim - 3)).expand(*index.shape, *x.shape[3:])

    @property
    def none(self) -> bool:
        return self.at is not None and self.at.shape[2] == 0


def lookups(weight: Tensor, cutoff: float, granularity: str) -> Lookups:
    """The queries whose weight (B, H, T) reaches the cutoff.

    With `per_head` all queries of a chunk choose together, so all are searched for; with `per_token` all heads do.
    A cutoff of 0 is reached without looking.
    """
    needed = weight >= cutoff
    if cutoff == 0:
        return Lookups(weight, needed)
    wanting = needed.any(1, keepdim=True) if granularity == "per_token" else needed
    count = int(wanting.sum(-1).max())
    if granularity == "per_head" and count:
        count = needed.shape[2]
    at = None
    if count < wanting.shape[2]:
        at = wanting.sort(dim=2, descending=True, stable=True).indices[..., :count]
    chosen = Lookups(weight, needed, at)
    return Lookups(weight, needed, at, chosen.select(needed))
