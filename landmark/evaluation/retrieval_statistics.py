"""How many distinct blocks a chunk retrieves, and what a slower tier would have to move (paper, Figure 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from landmark.memory.observer import Retrieval
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.models import LanguageModel


class RetrievalStatistics:
    """An observer of a memory (see `landmark.memory.Memory`) that looks at one chunk of every segment.

    position: the chunk's, in the stream with its landmarks. A sample and layer is one count: the union of the blocks
    that all its queries, landmarks included, and all its heads retrieve. Bytes are those of keys and values of normal
    tokens, 2·ℓ·d numbers, of every distinct pair of key/value head and block: each is moved once for the chunk, and
    the landmarks' keys, needed for scoring, never are.
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
        """samples, blocks_cached; distinct_blocks (mean over layers and samples); bytes_moved and bytes_cached (mean a
        sample, all layers); layers: of each, distinct_blocks [samples with 0, 1, 2, … of them] and bytes_moved.
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


def penultimate_chunk(model: LanguageModel, length: int, local: int) -> RetrievalStatistics:
    """Statistics of the last chunk but one of segments of `length` tokens, for the last may be shorter.

    Raises UserError where nothing can be retrieved there.
    """
    start = (-(-length // local) - 2) * local
    block_size = model.config.block_size
    if block_size is None or start < block_size:
        raise UserError(
            f"eval.retrieval_statistics=true: the last chunk but one of eval.length={length} tokens, "
            f"eval.local={local} at a time, has no blocks to retrieve"
        )
    return RetrievalStatistics(start + start // block_size)


def distinct(ages: Tensor, kept: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Distinct blocks, and distinct pairs of key/value head and block, of each sample, both (B,).

    ages: (B, H or 1, T or 1, q), of blocks retrieved out of the `kept` newest, 1 the newest, 0 for none. Heads
    that choose as one each need the block; query heads that share keys and values need it once.
    """
    ages = ages.flatten(2)
    seen = torch.zeros(*ages.shape[:2], kept + 1, dtype=torch.bool, device=ages.device).scatter(2, ages, True)[..., 1:]
    one_set = seen.shape[1] < kv_heads
    pairs = seen.expand(-1, kv_heads, -1) if one_set else seen.unflatten(1, (kv_heads, -1)).any(2)
    return seen.any(1).sum(-1), pairs.sum((1, 2))
