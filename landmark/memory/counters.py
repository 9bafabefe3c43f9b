"""What a memory counts while it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RATES = ("drop_rate", "drop_rates", "skipped")


class MemoryStatistics:
    """Counts since the last reset; see `landmark.memory.Memory.stats`."""

    def __init__(self):
        self.chunks = self.retrievals = self.blocks_retrieved = 0
        self.lookups = self.searches = self.searches_skipped = 0
        self.seconds_searching = 0.0
        self._dropped: dict[int, Tensor] = {}  # of each layer, (2, H): lookups that were possible, and not made

    def drop(self, layer: int, needed: Tensor) -> None:
        """needed: (B, H, T), bool, of queries that find a memory with something in it."""
        possible = torch.full((needed.shape[1],), needed[:, 0].numel(), device=needed.device)
        counts = torch.stack([possible, (~needed).sum((0, 2))])
        self._dropped[layer] = counts + self._dropped.get(layer, 0)

    def counts(self) -> dict[str, Any]:
        """Numbers that can be added up over memories; `with_rates` makes rates of sums."""
        counts: dict[str, Any] = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        if self._dropped:
            layers = [self._dropped[layer].tolist() for layer in sorted(self._dropped)]
            counts |= {"possible": [layer[0] for layer in layers], "dropped": [layer[1] for layer in layers]}
        return counts


def with_rates(counts: dict[str, Any]) -> dict[str, Any]:
    """Counts and, where a context miss token drops lookups: drop_rate, of all lookups; drop_rates, of each layer and
    head; skipped, the share of the searches, one a chunk and layer, that nothing was left of."""
    if "dropped" not in counts:
        return counts
    pairs = list(zip(counts["dropped"], counts["possible"], strict=True))
    return counts | {
        "drop_rate": sum(sum(dropped) for dropped, _ in pairs) / sum(sum(possible) for _, possible in pairs),
        "drop_rates": [[a / b for a, b in zip(*pair, strict=True)] for pair in pairs],
        "skipped": counts["searches_skipped"] / counts["searches"],
    }
