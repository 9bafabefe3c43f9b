"""What the queries of a chunk ask the blocks of a layer; selectors get it whole and change a field of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from landmark.attention import Grouped
from landmark.memory.layer import LayerMemory
from landmark.memory.positions import Lags, QueriesAtLags
from landmark.memory.query_selection import QuerySelection
from landmark.memory.settings import choosing_heads
from landmark.memory.store import BlockStore


@dataclass(frozen=True, eq=False)
class Question:
    """The retrieval of one layer and chunk.

    layer: number of the layer. position: stream position of the chunk's first token, landmarks included.
    state: the layer's blocks, and pending tokens before the chunk.
    block_size: ℓ.
    queries: of the chunk.
    k: blocks to choose.
    newest, first: so many of the k are the newest blocks, and those that begin the text, whatever they score.
    gate: of the memory.
    softcap: cap of the scores, in nats; None: there is none.
    backend: "triton" where its kernels may be used.
    """

    layer: int
    position: int
    state: LayerMemory
    block_size: int
    queries: QueriesAtLags
    k: int
    gate: Grouped
    softcap: float | None
    backend: str
    newest: int = 0
    first: int = 0

    @property
    def store(self) -> BlockStore:
        return self.state.store

    @property
    def lags(self) -> Lags:
        return self.queries.lags

    @property
    def selection(self) -> QuerySelection | None:
        """The queries that retrieve; None: the model has no context miss token, and all do."""
        return self.queries.selection

    @property
    def exact(self) -> Tensor:
        """The queries that rank blocks, (S, B, n, H, d), rotated for lag 1…S; without a gradient."""
        return self.queries.exact.detach()

    @property
    def rounded(self) -> Tensor:
        """The queries that attend to blocks, (S, B, n, H, d), rotated for lag 1…S."""
        return self.queries.rounded

    def preferred(self, scores: Tensor, ages: Tensor) -> Tensor:
        """The scores (…, n), ∞ for blocks that are read whatever they score. ages: (n,) or (…, n), of the blocks."""
        if not self.newest and not self.first:
            return scores
        return scores.masked_fill((ages <= self.newest) | (ages > self.store.added - self.first), math.inf)

    def of(self, selection: QuerySelection) -> Question:
        """The question of some of the queries."""
        return replace(self, queries=self.queries.of(selection))

    def sets(self, granularity: str) -> tuple[int, int, int]:
        """Sets of blocks that are chosen, (B, heads, queries)."""
        _, batch, queries, heads, _ = self.queries.exact.shape
        of_queries = 1 if granularity == "per_head" else queries
        return batch, choosing_heads(granularity, heads, self.store.kv_heads), of_queries
