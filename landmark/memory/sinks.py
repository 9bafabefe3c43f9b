"""Attention sinks: a plain transformer keeps the first and the last keys of a text (Xiao et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from landmark.memory.transformer_xl import RecurrentMemory


class SinkMemory(RecurrentMemory):
    """The first `sinks` and the last `window` keys and values of each layer, not rotated.

    Positions are counted within the cache: the dropped keys between sinks and window leave no gap.
    """

    def __init__(
        self,
        window: int,
        sinks: int = 4,
        rope_base: float | Tensor = 10000.0,
        key_offset: float = 0.0,
        still_layers: Collection[int] = (),
    ):
        """Start with nothing read.

        Args:
            window: last keys kept in each layer.
            sinks: first keys kept.
            rope_base, key_offset, still_layers: as in `landmark.memory.Memory`.
        """
        if sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {sinks}")
        self.sinks = sinks
        super().__init__(window, rope_base, key_offset, still_layers)

    @property
    def stats(self) -> dict[str, int]:
        """keys_kept: keys in a layer, now. bytes_kept: bytes of all layers."""
        kept = [x for pair in self._kept.values() for x in pair]
        return {
            "keys_kept": max((x.shape[2] for x in kept), default=0),
            "bytes_kept": sum(x.nbytes for x in kept),
        }

    def _keep(self, x: Tensor) -> Tensor:
        if x.shape[2] <= self.sinks + self.cache:
            return x
        return torch.cat([x[:, :, : self.sinks], super()._keep(x)], 2)
