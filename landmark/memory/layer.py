"""What a memory keeps for one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.memory.block_store import BlockStore
from landmark.memory.index import LandmarkIndex


class LayerMemory:
    """The blocks of one layer, and the tokens that are not in a complete block yet.

    index: of the landmarks of the blocks; None: all landmarks are scanned.
    """

    def __init__(self, store: BlockStore, index: LandmarkIndex | None = None):
        self.store, self.index = store, index
        self.pending: tuple[Tensor, Tensor] | None = None  # keys and values (B, H, pending, d), not rotated
        self.chunk: tuple[Tensor, Tensor] | None = None  # those of pending tokens and chunk, until the commit

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, pending + T, d) of the pending tokens and of a chunk (B, H, T, d)."""
        if self.pending is not None:
            k, v = torch.cat([self.pending[0], k], 2), torch.cat([self.pending[1], v], 2)
        self.chunk = k, v
        return k, v
