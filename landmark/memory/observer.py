"""What an observer of a memory sees: the blocks that each query reads, and what they weigh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from landmark.memory.block_store import BlockStore
from landmark.memory.lookups import Lookups


@dataclass(frozen=True)
class Retrieval:
    """What the queries of a chunk look up in one layer.

    position: the chunk's, in the stream with its landmarks. store: the layer's. ages: (B, H or 1, n or 1, q), of the
    blocks retrieved, oldest first, 1 the newest, 0 for none; n is T, or fewer where a context miss token leaves
    queries out, q is 0 where nothing is looked up. weights: (B, H, n, q), the share of a query's attention that a
    block gets; None where one kernel does it all. missed: (B, H, T), the weight of the context miss token, if there is
    one: what is retrieved has it, or where nothing is, nobody.
    """

    layer: int
    position: int
    store: BlockStore
    ages: Tensor
    weights: Tensor | None
    missed: Tensor | None = None
    lookups: Lookups | None = None

    def of_queries(self) -> tuple[Tensor, Tensor]:
        """Ages and weights for each query and head, (B, H, T, q), both 0 where it reads no block.

        Raises ValueError where the weights are not known.
        """
        if self.weights is None:
            raise ValueError("no weights are known: give the memory another backend than triton, as blockwise")
        ages, weights, lookups = self.ages.expand(*self.weights.shape), self.weights, self.lookups
        if lookups is None:
            return ages, weights
        if lookups.reading is not None:
            ages = ages * lookups.reading[..., None]
        shape = *lookups.needed.shape, ages.shape[-1]
        return lookups.add(ages.new_zeros(shape), ages), lookups.add(weights.new_zeros(shape), weights)


Observer = Callable[[Retrieval], None]
