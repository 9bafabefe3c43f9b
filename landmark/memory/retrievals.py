"""What a memory tells of its retrievals: counts, and for an observer the blocks of each query with their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from landmark.memory.landmarks.block_store import BlockStore
from landmark.memory.landmarks.layer import Question

RATES = ("drop_rate", "drop_rates", "skipped")


class MemoryStatistics:
    """Counts since the last reset of a memory: sums over layers, samples and heads unless stated otherwise.

    - chunks: chunks committed.
    - searches: one for each chunk and layer with blocks in memory. searches_skipped: those not needed, because every
      query was below the cutoff. seconds_searching: time of the others; on a GPU, time to launch them.
    - lookups: queries that retrieve. retrievals: sets of blocks chosen; queries or heads that choose together choose
      one set. blocks_retrieved: blocks in these sets.
    - With a context miss token: possible and dropped lookups of each layer and head, and the rates of `with_rates`.
    """

    def __init__(self):
        self.chunks = self.retrievals = self.blocks_retrieved = 0
        self.lookups = self.searches = self.searches_skipped = 0
        self.seconds_searching = 0.0
        self._dropped: dict[int, Tensor] = {}  # by layer, (2, H): lookups that were possible, and those dropped

    def count_search(self, question: Question, seconds: float | None) -> None:
        """Count a search that took so long (None: it was not needed), and possible and dropped lookups."""
        self.searches += 1
        self.searches_skipped += seconds is None
        self.seconds_searching += seconds or 0.0
        if (weight := question.cmt_weight) is not None:
            possible = torch.full((weight.shape[1],), weight[:, 0].numel(), device=weight.device)
            retrieves = question.retrieves
            dropped = torch.zeros_like(possible) if retrieves is None else (~retrieves).sum((0, 2))
            counts = torch.stack([possible, dropped])
            self._dropped[question.layer] = counts + self._dropped.get(question.layer, 0)

    def count_retrieved(self, ages: Tensor, queries: int, retrieves: Tensor | None) -> None:
        """Count a chunk's retrieval. ages, retrieves: as of `Retrieval`. queries: B·H·T."""
        blocks, lookups = ages.numel(), queries
        if retrieves is not None:
            blocks, lookups = int((ages > 0).sum()), int(retrieves.sum())
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


@dataclass(frozen=True)
class Stored:
    """The counts of a layer's blocks that an observer is told. added: those from which the chunk's last query chooses.
    block_bytes: of one head.
    """

    added: int
    kv_heads: int
    block_bytes: int

    def __len__(self) -> int:
        return self.added


@dataclass(frozen=True)
class Retrieval:
    """The blocks that the queries of a chunk retrieve in one layer.

    position: stream position of the chunk's first token, landmarks included. ages: (B, H, H_kv or 1, T or 1, q), of the
    blocks, oldest first; 1 is the newest block, 0 no block. q is 0 where nothing is retrieved. weights: (B, H, T, q),
    each block's share of a query's attention; None: not known, as a fused kernel ran or blocks have gates in a memory
    without landmarks. cmt_weight, retrieves: as of `Question`.
    """

    layer: int
    position: int
    store: BlockStore | Stored
    ages: Tensor
    weights: Tensor | None
    cmt_weight: Tensor | None = None
    retrieves: Tensor | None = None

    def per_query(self) -> tuple[Tensor, Tensor]:
        """Ages and weights for each query and head, (B, H, T, q); both are 0 for no block. ValueError: not known."""
        if self.weights is None:
            raise ValueError("the weights are not known with the backend triton: give the memory the backend blockwise")
        ages = self.ages.repeat_interleave(self.weights.shape[1] // self.ages.shape[1], 1).expand(*self.weights.shape)
        return ages if self.retrieves is None else ages * self.retrieves[..., None], self.weights


def masked_ages(ages: Tensor, retrieves: Tensor) -> Tensor:
    """Ages as of `Retrieval`, 0 where no query that retrieves, (B, H, T), bool, uses them."""
    read = retrieves.unflatten(1, (ages.shape[1], -1)).any(2)
    return ages * (read.any(2, keepdim=True) if ages.shape[2] == 1 else read)[..., None]


Observer = Callable[[Retrieval], None]
