"""The tiles of blockwise.py: a few blocks of queries against the blocks of keys that they see.

N: sequences (the heads of some samples). Padded tensors are (N, rows, …), see alignment.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.alignment import BlockAlignment
from landmark.attention.scoring import capped_in_place
from landmark.attention.workspace import Workspace
from landmark.utils.constants import LOG2_E


def product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """Batched matrix product a·b·scale.

    Args:
        a: (N, m, n).
        b: (N, n, p).
        out: (N, m, p), is overwritten and returned.
        scale: factor of the product.
    """
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


@dataclass(frozen=True)
class Tile:
    """The queries of blocks start … stop−1 against the keys of blocks 0 … stop−1."""

    alignment: BlockAlignment
    start: int
    stop: int

    @property
    def row(self) -> int:
        """First row of the tile in the padded queries."""
        return (self.start - self.alignment.first) * self.alignment.width

    def queries(self, padded: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row for each query."""
        return padded[:, self.row : self.row + (self.stop - self.start) * self.alignment.width]

    def row_of(self, padded: Tensor) -> Tensor:
        """The tile's part of one number for each query: (N, rows, 1) → (N, 1, query)."""
        return self.queries(padded).mT

    def controlled(self, blocks: Tensor) -> Tensor:
        """Whether a landmark is controlled, (n, blocks) → (N, block, query); False for the query's own block."""
        mask = blocks[:, : self.stop].repeat_interleave(self.alignment.heads, 0)[..., None]
        mask = mask.repeat(1, 1, (self.stop - self.start) * self.alignment.width)
        self.own(mask).fill_(False)
        return mask

    def keys(self, padded: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row for each key."""
        return padded[:, : self.stop * self.alignment.width]

    def blocked(self, x: Tensor) -> Tensor:
        """(N, keys, queries) → (N, block, offset, queries)."""
        return x.unflatten(1, (self.stop, self.alignment.width))

    def own(self, x: Tensor) -> Tensor:
        """The part of each query's own block, a view: (N, block, …, queries) → (N, …, offset, block)."""
        return x.unflatten(-1, (-1, self.alignment.width)).diagonal(-self.start, 1, x.ndim - 1)

    def scores(self, q: Tensor, k: Tensor, scale: float, cap: float | None, work: Workspace) -> Tensor:
        """Scores (N, block, offset, query) of all keys, in units of log 2.

        Args:
            q, k: (N, rows, d), padded.
            scale: factor of the scores.
            cap: of the scores, in nats; None: there is none.
            work: workspace that holds the result.
        """
        keys, queries = self.keys(k), self.queries(q)
        scores = work("scores", len(q), keys.shape[1], queries.shape[1])
        product(keys, queries.mT, scores, scale * LOG2_E)
        return self.blocked(capped_in_place(scores, None if cap is None else cap * LOG2_E))

    def gates(self, scores: Tensor) -> Tensor:
        """Scores of the landmarks (N, block, query), −∞ for the query's own block and later ones."""
        gates = scores[:, :, -1].clone()
        for block in range(self.start + 1, self.stop):
            gates[:, block, : (block - self.start) * self.alignment.width] = -torch.inf
        self.own(gates).fill_(-torch.inf)
        return gates

    def mask(self, scores: Tensor) -> Tensor:
        """Put −∞ in the scores, in place, of landmarks, of padding before the window, and of later tokens."""
        scores[:, :, -1] = -torch.inf
        if self.alignment.hidden is not None:
            first = scores[:, 0, :-1].unflatten(0, (-1, self.alignment.heads))
            first.masked_fill_(self.alignment.hidden, -torch.inf)
        for block in range(self.start + 1, self.stop):
            scores[:, block, :, : (block - self.start) * self.alignment.width] = -torch.inf
        self.own(scores).masked_fill_(self.alignment.future, -torch.inf)
        return scores
