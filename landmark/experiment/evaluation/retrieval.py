"""Observers of a memory: distinct blocks that a chunk retrieves (paper, Appendix C) and their bytes; and a map of a
text.

Where a text is a stretch and the same stretch again, a token of the second copy that finds its earlier occurrence
retrieves a block from half a text before it. On the map these blocks are a line, half a text below the diagonal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from landmark.memory.retrievals import Retrieval
from landmark.utils.errors import UserError

CELLS = 64  # most cells of a map either way


class RetrievalStatistics:
    """Counts the retrievals of one chunk of every segment: an observer of a memory (`landmark.memory.retrievals`).

    Each sample and layer gives one count: the union of the blocks that all queries (landmarks included) and heads
    retrieve. Each pair of key/value head and block is moved once for the chunk, 2·ℓ·d numbers; landmark keys are never
    moved. position: first position of the chunk in the segment, landmarks included. length: its tokens.
    """

    def __init__(self, position: int, length: int):
        self.position, self._length = position, length
        self._counts: dict[int, Tensor] = {}  # of each layer: samples by their number of distinct blocks
        self._pairs: dict[int, int] = {}
        self._pair_bytes = self._heads = 0

    def __call__(self, retrieval: Retrieval) -> None:
        if self.position < retrieval.position < self.position + self._length:
            raise UserError(
                f"eval.task=unique_blocks: the chunk at position {self.position} is read in another way from "
                f"{retrieval.position} on: set another eval.length or eval.local"
            )
        if retrieval.position != self.position:
            return
        layer, store = retrieval.layer, retrieval.store
        blocks, pairs = distinct(retrieval.ages, len(store), store.kv_heads)
        counts = torch.bincount(blocks, minlength=len(store) + 1).cpu()
        self._counts[layer] = counts + self._counts.get(layer, 0)
        self._pairs[layer] = int(pairs.sum()) + self._pairs.get(layer, 0)
        self._heads = store.kv_heads
        self._pair_bytes = store.block_bytes

    def summary(self) -> dict[str, Any]:
        """samples; blocks_cached; distinct_blocks, mean over layers and samples; bytes_moved, bytes_cached, mean over
        samples, sum over layers; layers, for each distinct_blocks [samples with 0, 1, 2, … of them] and bytes_moved.
        """
        layers = sorted(self._counts)
        samples, cached = int(self._counts[layers[0]].sum()), len(self._counts[layers[0]]) - 1
        moved = {layer: self._pairs[layer] * self._pair_bytes / samples for layer in layers}
        total = sum(float(self._counts[layer] @ torch.arange(cached + 1)) for layer in layers)
        return {
            "samples": samples,
            "blocks_cached": cached,
            "distinct_blocks": total / samples / len(layers),
            "bytes_moved": sum(moved.values()),
            "bytes_cached": len(layers) * self._heads * cached * self._pair_bytes,
            "layers": [
                {"distinct_blocks": self._counts[layer].tolist(), "bytes_moved": moved[layer]} for layer in layers
            ],
        }


def distinct(ages: Tensor, kept: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Distinct blocks, and distinct pairs of key/value head and block, of each sample, both (B,).

    ages: (B, H, H_kv or 1, T or 1, q), of retrieved blocks, 1 the newest, 0 for none. kept: blocks in memory. A block
    that heads choose together is needed by every key/value head; query heads that share one need it once.
    """
    ages = ages.flatten(2)
    seen = torch.zeros(*ages.shape[:2], kept + 1, dtype=torch.bool, device=ages.device).scatter(2, ages, True)[..., 1:]
    one_set = seen.shape[1] < kv_heads
    pairs = seen.expand(-1, kv_heads, -1) if one_set else seen.unflatten(1, (kv_heads, -1)).any(2)
    return seen.any(1).sum(-1), pairs.sum((1, 2))


class RetrievalMap:
    """Maps the retrievals of every head: an observer of a memory (`landmark.memory.retrievals`).

    A cell is a block, or several where a text has more than CELLS. Its value is the share of a query's attention that
    goes to its blocks by retrieval, a mean over queries without landmarks; with a fused kernel, how many of them are
    retrieved. length: tokens of a text, whose second half repeats the first. local: tokens of a chunk. block_size: ℓ.
    """

    def __init__(self, length: int, local: int, block_size: int):
        self.length, self.local, self.block_size = length, local, block_size
        read = torch.arange(length - 1)  # the last token is predicted and not read
        blocks = -(-len(read) // block_size)
        self.cell = block_size * -(-blocks // CELLS)  # tokens
        self.size = -(-len(read) // self.cell)
        self.share_of = "attention"
        self._rows = read // self.cell
        half = length // 2
        self._earlier = (read - half).div(block_size, rounding_mode="floor")  # block of the earlier occurrence
        kept = read // local * local // block_size
        self._looked_for = (read // local > half // local) & (self._earlier < kept)
        self._layers: dict[int, tuple[Tensor, ...]] = {}  # sums of cells, of the diagonal; blocks found

    def __call__(self, retrieval: Retrieval) -> None:
        if retrieval.ages.shape[-1] == 0:
            return
        position, device = retrieval.position, retrieval.ages.device
        start = position - position // (self.block_size + 1)
        stop = min(start + self.local, self.length - 1)
        tokens = torch.arange(start, stop)
        at = (tokens + tokens // self.block_size - position).to(device)  # places among the queries
        ages, shares = self._per_query(retrieval, stop + stop // self.block_size - position)
        ages, shares = ages[:, :, at], shares[:, :, at].float()
        blocks = torch.where(ages > 0, retrieval.store.added - ages, 0)
        cells = (self._rows[tokens] * self.size).to(device)[:, None] + blocks * self.block_size // self.cell
        found = (blocks == self._earlier[tokens].to(device)[:, None]) & (ages > 0)
        if retrieval.layer not in self._layers:
            heads = shares.shape[1]
            sizes = (heads, self.size**2), (heads,), (heads,)
            self._layers[retrieval.layer] = tuple(shares.new_zeros(size) for size in sizes)
        sums, diagonal, hits = self._layers[retrieval.layer]
        sums.scatter_add_(1, cells.transpose(0, 1).flatten(1), shares.transpose(0, 1).flatten(1))
        diagonal += (shares * found).sum((0, 2, 3))
        hits += (found.any(-1) & self._looked_for[tokens].to(device)).sum((0, 2))

    def _per_query(self, retrieval: Retrieval, queries: int) -> tuple[Tensor, Tensor]:
        """Ages and shares of every query, (B, H, T, q); a share is 1 where weights are not known. queries: T."""
        if retrieval.weights is None:
            self.share_of = "queries"
            ages, retrieves = retrieval.ages, retrieval.retrieves
            shape = (*ages.shape[:2], queries) if retrieves is None else retrieves.shape
            retrieval = replace(retrieval, weights=torch.ones(*shape, ages.shape[-1], device=ages.device))
        ages, shares = retrieval.per_query()
        return ages, shares * (ages > 0)

    def summary(self, texts: int) -> dict[str, Any] | None:
        """The map of the head that finds the earlier occurrence best; None where nothing was retrieved. texts: read.

        Returns layer and head, the (first) one with the highest value for the block of the earlier occurrence; found,
        the share of its queries in the second copy, without those of the chunk in which that begins, that retrieve this
        block (None: there are none); cell, in tokens; share_of, "attention" or "queries"; best, for each cell of
        queries a list with the values of all cells of blocks.
        """
        if not self._layers:
            return None
        layers = sorted(self._layers)
        heads = [(layer, head) for layer in layers for head in range(len(self._layers[layer][1]))]
        sums, diagonal, hits = (torch.cat([self._layers[layer][part] for layer in layers]).cpu() for part in range(3))
        best = int(diagonal.argmax())
        shown = sums[best].view(self.size, self.size) / (texts * torch.bincount(self._rows))[:, None]
        queries = texts * int(self._looked_for.sum())
        return {
            "layer": heads[best][0],
            "head": heads[best][1],
            "found": round(float(hits[best]) / queries, 4) if queries else None,
            "cell": self.cell,
            "share_of": self.share_of,
            "best": [[round(value, 4) for value in row] for row in shown.tolist()],
        }
