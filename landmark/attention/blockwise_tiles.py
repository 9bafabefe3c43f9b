"""The tiles that blockwise.py computes: a few blocks of queries against every block of keys so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.alignment import BlockAlignment
from landmark.attention.workspace import Workspace

LOG2_E = math.log2(math.e)


def product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """Batched matrix product.

    Args:
        a: (N, m, n).
        b: (N, n, p).
        out: (N, m, p), which is overwritten and returned.
        scale: factor of the product.
    """
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


@dataclass(frozen=True)
class Tile:
    """The queries of the blocks start … stop−1 against the keys of the blocks 0 … stop−1."""

    alignment: BlockAlignment
    start: int
    stop: int

    @property
    def row(self) -> int:
        """First row of the tile in the padded queries."""
        return (self.start - self.alignment.first) * self.alignment.width

    def queries(self, padded: Tensor) -> Tensor:
        return padded[:, self.row : self.row + (self.stop - self.start) * self.alignment.width]

    def row_of(self, padded: Tensor) -> Tensor:
        """One number for each query, (N, rows, 1) → (N, 1, query)."""
        return self.queries(padded).mT

    def controlled(self, blocks: Tensor) -> Tensor:
        """Controlled landmarks, (n, blocks) → (N, block, query); the landmark of the query's own block never is one."""
        mask = blocks[:, : self.stop].repeat_interleave(self.alignment.heads, 0)[..., None]
        mask = mask.repeat(1, 1, (self.stop - self.start) * self.alignment.width)
        self.own(mask).fill_(False)
        return mask

    def keys(self, padded: Tensor) -> Tensor:
        return padded[:, : self.stop * self.alignment.width]

    def blocked(self, x: Tensor) -> Tensor:
        """(N, keys, queries) → (N, block, offset, queries)."""
        return x.unflatten(1, (self.stop, self.alignment.width))

    def own(self, x: Tensor) -> Tensor:
        """(N, block, …, queries) → (N, …, offset, query block), each query's own block."""
        return x.unflatten(-1, (-1, self.alignment.width)).diagonal(-self.start, 1, x.ndim - 1)

    def scores(self, q: Tensor, k: Tensor, scale: float, work: Workspace) -> Tensor:
        """Scores (N, block, offset, query) of all keys, in the workspace.

        Args:
            q, k: (N, rows, d), padded.
            scale: of the scores.
            work: holds the result.
        """
        keys, queries = self.keys(k), self.queries(q)
        scores = work("scores", len(q), keys.shape[1], queries.shape[1])
        return self.blocked(product(keys, queries.mT, scores, scale * LOG2_E))

    def gates(self, scores: Tensor) -> Tensor:
        """Scores of the landmarks (N, block, query), −∞ from each query's own block on."""
        gates = scores[:, :, -1].clone()
        for block in range(self.start, self.stop):
            gates[:, block, : (block - self.start + 1) * self.alignment.width] = -torch.inf
        return gates

    def mask(self, scores: Tensor) -> Tensor:
        """−∞, in place, for landmarks, padding and later tokens of a query's own block."""
        scores[:, :, -1] = -torch.inf
        if self.alignment.hidden is not None:
            first = scores[:, 0, :-1].unflatten(0, (-1, self.alignment.heads))
            first.masked_fill_(self.alignment.hidden, -torch.inf)
        self.own(scores).masked_fill_(self.alignment.future, -torch.inf)
        return scores
