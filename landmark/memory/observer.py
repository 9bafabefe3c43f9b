"""The record that an observer of a memory gets: the blocks that each query retrieves, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from landmark.memory.query_selection import QuerySelection
from landmark.memory.store import BlockStore


class Stored(NamedTuple):
    """The blocks of a layer of which an observer is told no more. added: complete blocks. block_bytes: of one head."""

    added: int
    kv_heads: int
    block_bytes: int


@dataclass(frozen=True)
class Retrieval:
    """The blocks that the queries of a chunk retrieve in one layer.

    layer: number of the layer. position: stream position of the chunk's first token, landmarks included.
    store: the layer's blocks.
    ages: (B, H, H_kv or 1, n or 1, q), of the retrieved blocks, oldest first; 1 is the newest block, 0 no block. n is
        T, or fewer with a cutoff. q is 0 where nothing is retrieved.
    weights: (B, H, n, q), each block's share of a query's attention. None: not known, because a fused kernel ran.
    cmt_weight: (B, H, T), the weight S of the context miss token. None: the model has no such token.
    selection: the queries that retrieve. None: all.
    """

    layer: int
    position: int
    store: BlockStore | Stored
    ages: Tensor
    weights: Tensor | None
    cmt_weight: Tensor | None = None
    selection: QuerySelection | None = None

    def per_query(self) -> tuple[Tensor, Tensor]:
        """Ages and weights for each query and head, (B, H, T, q); both are 0 for no block.

        Raises ValueError where the weights are not known.
        """
        if self.weights is None:
            raise ValueError("the weights are not known with the backend triton: give the memory the backend blockwise")
        weights, selection = self.weights, self.selection
        ages = self.ages.repeat_interleave(weights.shape[1] // self.ages.shape[1], 1).expand(*weights.shape)
        if selection is None:
            return ages, weights
        if selection.selected is not None:
            ages = ages * selection.selected[..., None]
        shape = *selection.retrieves.shape, ages.shape[-1]
        return (
            selection.scatter_add(ages.new_zeros(shape), ages),
            selection.scatter_add(weights.new_zeros(shape), weights),
        )


Observer = Callable[[Retrieval], None]
