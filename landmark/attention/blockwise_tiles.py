"""The tiles of blockwise.py: a few blocks of queries against the blocks of keys that they see.

N: sequences (the heads of some samples). Padded tensors are (N, rows, …), see alignment.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.alignment import BlockAlignment
from landmark.attention.softcap import capped_in_place
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
    """The queries of blocks start … stop−1 against the keys of blocks 0 … end−1."""

    alignment: BlockAlignment
    start: int
    stop: int

    @property
    def end(self) -> int:
        """Blocks of keys: those up to the queries, or with `bidirectional` all."""
        return self.alignment.blocks if self.alignment.bidirectional else self.stop

    @property
    def local(self) -> range:
        """How many blocks before a query's own block its local blocks are; 0 is the own block."""
        reach = self.alignment.local_blocks
        return range(-reach if self.alignment.bidirectional else 0, reach + 1)

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
        """Whether a landmark is controlled, (n, blocks) → (N, block, query); False for the query's local blocks."""
        mask = blocks[:, : self.end].repeat_interleave(self.alignment.heads, 0)[..., None]
        mask = mask.repeat(1, 1, (self.stop - self.start) * self.alignment.width)
        for lag in self.local:
            self.own(mask, lag).fill_(False)
        return mask

    def keys(self, padded: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row for each key."""
        return padded[:, : self.end * self.alignment.width]

    def blocked(self, x: Tensor) -> Tensor:
        """(N, keys, queries) → (N, block, offset, queries)."""
        return x.unflatten(1, (self.end, self.alignment.width))

    def own(self, x: Tensor, lag: int = 0) -> Tensor:
        """The part of the block `lag` before each query's own, a view: (N, block, …, queries) → (N, …, offset, block).

        Query blocks without such a block are left out.
        """
        return x.unflatten(-1, (-1, self.alignment.width)).diagonal(lag - self.start, 1, x.ndim - 1)

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
        """Scores of the landmarks (N, block, query), −∞ for the query's local blocks and those it does not see."""
        gates = scores[:, :, -1].clone()
        if self.alignment.behind is not None:
            self._mask_behind(gates[:, :, None], self.alignment.behind[..., -1:, :])
        else:
            for block in range(self.start + 1, self.stop):
                gates[:, block, : (block - self.start) * self.alignment.width] = -torch.inf
        for lag in self.local:
            self.own(gates, lag).fill_(-torch.inf)
        return gates

    def _mask_behind(self, scores: Tensor, behind: Tensor) -> None:
        """Put −∞ in the scores (N, block, offset, query) of padding in the last blocks, in place."""
        scores[:, -behind.shape[2] :].unflatten(0, (-1, self.alignment.heads)).masked_fill_(behind, -torch.inf)

    def given_gates(self, padded: Tensor) -> Tensor:
        """Scores given for landmarks: (N, rows, blocks), in nats, → (N, block, query); −∞ where a block is not seen."""
        return self.queries(padded)[..., : self.end].mT.contiguous() * LOG2_E

    def mask(self, scores: Tensor) -> Tensor:
        """Put −∞ in the scores, in place, of landmarks, padding and empty places, and of later tokens if causal."""
        scores[:, :, -1] = -torch.inf
        if self.alignment.empty is not None:
            by_sample = scores.unflatten(0, (-1, self.alignment.heads))
            by_sample.masked_fill_(self.alignment.empty[:, :, : self.end], -torch.inf)
        if self.alignment.hidden is not None:
            first = scores[:, 0, :-1].unflatten(0, (-1, self.alignment.heads))
            first.masked_fill_(self.alignment.hidden, -torch.inf)
        if self.alignment.behind is not None:
            self._mask_behind(scores, self.alignment.behind)
            return scores
        for block in range(self.start + 1, self.stop):
            scores[:, block, :, : (block - self.start) * self.alignment.width] = -torch.inf
        self.own(scores).masked_fill_(self.alignment.future, -torch.inf)
        return scores
