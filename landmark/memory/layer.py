"""The part of a memory that belongs to one layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.memory.block_store import BlockStore
from landmark.memory.hierarchy import GroupKeys
from landmark.memory.index import LandmarkIndex


class LayerMemory:
    """The blocks of one layer, and its pending tokens, which are not stored in blocks yet.

    index: index of the blocks' landmarks; None: all landmarks are scored.
    groups: keys of the groups of landmarks; None: the model has no such groups.
    """

    def __init__(self, store: BlockStore, index: LandmarkIndex | None = None, groups: GroupKeys | None = None):
        self.store, self.index, self.groups = store, index, groups
        self.pending: tuple[Tensor, Tensor] | None = None  # keys and values (B, H, pending, d), not rotated
        self.last_key: Tensor | None = None  # of the last normal token, the channels that the next one takes
        self.chunk: tuple[Tensor, Tensor] | None = None  # the same of pending tokens and chunk, until the commit
        self.empty: Tensor | None = None  # (1, pending + T), bool: which of these are empty places
        self.queries: Tensor | None = None  # (B, H, n, d) of the last tokens, with a query window; not rotated
        self.next_queries: Tensor | None = None  # those after the commit
        self.weights: Tensor | None = None  # (B, H, n, ℓ) of the tokens of complete blocks in pooled keys

    @property
    def num_pending(self) -> int:
        """Tokens that are pending, landmarks included."""
        return 0 if self.pending is None else self.pending[0].shape[2]

    def append(self, k: Tensor, v: Tensor, empty: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a chunk's keys and values (B, H, T, d) to the pending ones: (B, H, pending + T, d).

        empty: (1, T), bool, its places without a token; None: there are none. Pending tokens belong to a block that is
        not complete, so there are none among them.
        """
        self.empty = None if empty is None else F.pad(empty, (self.num_pending, 0))
        if self.pending is not None:
            k, v = torch.cat([self.pending[0], k], 2), torch.cat([self.pending[1], v], 2)
        self.chunk = k, v
        return k, v

    def ask(self, q: Tensor, window: int) -> Tensor:
        """A chunk's queries (B, H, T, d) after those of tokens before it, at most window − 1."""
        asked = q if self.queries is None else torch.cat([self.queries.to(q.dtype)[:, :, 1 - window :], q], 2)
        self.next_queries = asked[:, :, 1 - window :].detach()
        return asked

    def end_chunk(self) -> None:
        """The chunk is committed: the next one follows it."""
        self.chunk, self.queries, self.next_queries = None, self.next_queries, None
