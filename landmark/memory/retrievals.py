"""What a memory tells of its retrievals: counts, and for an observer the blocks of each query with their weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from landmark.memory.layer import QuerySelection
from landmark.memory.store import BlockStore

RATES = ("drop_rate", "drop_rates", "skipped")


class MemoryStatistics:
    """Counts since the last reset of a memory. `Memory.stats` returns them, together with sizes.

    Counts are sums over layers, samples and heads unless stated otherwise.

    - chunks: chunks committed.
    - searches: one for each chunk and layer with blocks in memory. searches_skipped: searches that were not needed,
      because every query was below the cutoff. seconds_searching: time of retrieval; on a GPU, time to launch it.
    - lookups: queries that retrieve. retrievals: sets of blocks chosen; queries or heads that choose together choose
      one set. blocks_retrieved: blocks in these sets.
    - blocks_kept: blocks of a layer. bytes_kept: bytes of all layers.
    - With a tier other than the device, the counts of `landmark.memory.store.tiers.TierCounts`.
    - With a context miss token: possible and dropped lookups of each layer and head, and the rates of `with_rates`.
    """

    def __init__(self):
        self.chunks = self.retrievals = self.blocks_retrieved = 0
        self.lookups = self.searches = self.searches_skipped = 0
        self.seconds_searching = 0.0
        self._dropped: dict[int, Tensor] = {}  # by layer, (2, H): lookups that were possible, and those dropped

    def copy(self) -> "MemoryStatistics":
        copied = copy.copy(self)
        copied._dropped = dict(self._dropped)
        return copied

    def count_search(self, layer: int, selection: QuerySelection | None, seconds: float) -> None:
        """Count a search that took so long, and the possible and the dropped lookups of its queries."""
        self.searches += 1
        if selection is None:
            self.seconds_searching += seconds
            return
        if selection.is_empty:
            self.searches_skipped += 1
        else:
            self.seconds_searching += seconds
        retrieves = selection.retrieves  # (B, H, T)
        possible = torch.full((retrieves.shape[1],), retrieves[:, 0].numel(), device=retrieves.device)
        counts = torch.stack([possible, (~retrieves).sum((0, 2))])
        self._dropped[layer] = counts + self._dropped.get(layer, 0)

    def count_retrieved(self, ages: Tensor, queries: int, selection: QuerySelection | None) -> None:
        """Count a chunk's retrieval. ages: as of `Retrieval`. queries: B·H·T. selection: those that retrieve."""
        blocks, lookups = ages.numel(), queries
        if selection is not None and selection.selected is not None:
            blocks, lookups = int((ages > 0).sum()), int(selection.selected.sum())
        self.count_sets(blocks // ages.shape[-1], ages.shape[-1], lookups)

    def count_sets(self, sets: int, blocks: int, lookups: int) -> None:
        """Count sets of so many blocks each, chosen for so many queries."""
        self.retrievals += sets
        self.blocks_retrieved += sets * blocks
        self.lookups += lookups

    def counts(self) -> dict[str, Any]:
        """The counts, which can be added up over memories; `with_rates` computes rates of the sums."""
        counts: dict[str, Any] = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        if self._dropped:
            layers = [self._dropped[layer].tolist() for layer in sorted(self._dropped)]
            counts |= {"possible": [layer[0] for layer in layers], "dropped": [layer[1] for layer in layers]}
        return counts


def with_rates(counts: dict[str, Any]) -> dict[str, Any]:
    """The counts, and with a context miss token three rates.

    drop_rate: share of possible lookups that were dropped. drop_rates: of each layer and head. skipped: share of
    searches that were not needed, because every lookup was dropped.
    """
    if "dropped" not in counts:
        return counts
    pairs = list(zip(counts["dropped"], counts["possible"], strict=True))
    return counts | {
        "drop_rate": sum(sum(dropped) for dropped, _ in pairs) / sum(sum(possible) for _, possible in pairs),
        "drop_rates": [[a / b for a, b in zip(*pair, strict=True)] for pair in pairs],
        "skipped": counts["searches_skipped"] / counts["searches"],
    }


class Stored(NamedTuple):
    """The counts of a layer's blocks that an observer is told. added: complete blocks. block_bytes: of one head."""

    added: int
    kv_heads: int
    block_bytes: int


@dataclass(frozen=True)
class Retrieval:
    """The blocks that the queries of a chunk retrieve in one layer.

    position: stream position of the chunk's first token, landmarks included. ages: (B, H, H_kv or 1, n or 1, q), of the
    blocks, oldest first; 1 is the newest block, 0 no block. n is T, or fewer with a cutoff. q is 0 where nothing is
    retrieved. weights: (B, H, n, q), each block's share of a query's attention; None: a fused kernel ran. cmt_weight:
    (B, H, T), the weight S of the context miss token. selection: the queries that retrieve; None: all.
    """

    layer: int
    position: int
    store: BlockStore | Stored
    ages: Tensor
    weights: Tensor | None
    cmt_weight: Tensor | None = None
    selection: QuerySelection | None = None

    def per_query(self) -> tuple[Tensor, Tensor]:
        """Ages and weights for each query and head, (B, H, T, q); both are 0 for no block. ValueError: not known."""
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
