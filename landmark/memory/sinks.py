"""Attention sinks: a plain transformer keeps the first and the last keys of a text (Xiao et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.keys import Keys
from landmark.memory.transformer_xl import RecurrentMemory


class SinkMemory(RecurrentMemory):
    """The first `sinks` and the last `window` keys and values of each layer, not rotated.

    Positions are counted within the cache: the dropped keys between sinks and window leave no gap.
    """

    def __init__(self, window: int, sinks: int = 4, keys: Keys | None = None):
        """Start with nothing read.

        Args:
            window: last keys of each layer that are cached.
            sinks: first keys that are.
            keys: as in `RecurrentMemory`.
        """
        if sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {sinks}")
        self.sinks = sinks
        super().__init__(window, keys)

    @property
    def stats(self) -> dict[str, int]:
        """keys_kept: keys in a layer, now. bytes_kept: bytes of all layers."""
        cached = [x for pair in self._cached.values() for x in pair]
        return {
            "keys_kept": max((x.shape[2] for x in cached), default=0),
            "bytes_kept": sum(x.nbytes for x in cached),
        }

    def _newest(self, x: Tensor) -> Tensor:
        if x.shape[2] <= self.sinks + self.cache:
            return x
        return torch.cat([x[:, :, : self.sinks], super()._newest(x)], 2)
