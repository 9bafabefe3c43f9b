"""An observer of a memory: distinct blocks that a chunk retrieves (paper, Appendix C), and their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from landmark.memory.retrievals import Retrieval


class RetrievalStatistics:
    """Counts the retrievals of one chunk of every segment: an observer of a memory (`landmark.memory.retrievals`).

    Each sample and layer gives one count: the union of the blocks that all queries (landmarks included) and heads
    retrieve. Each pair of key/value head and block is moved once for the chunk, 2·ℓ·d numbers; landmark keys are never
    moved. position: first position of the chunk in the segment, landmarks included.
    """

    def __init__(self, position: int):
        self.position = position
        self._counts: dict[int, Tensor] = {}  # of each layer: samples by their number of distinct blocks
        self._pairs: dict[int, int] = {}
        self._pair_bytes = self._heads = 0

    def __call__(self, retrieval: Retrieval) -> None:
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
