"""Transformer-XL's memory: the keys and values of the last tokens, for every layer (Dai et al. 2019)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from landmark.attention.causal import causal_attention
from landmark.attention.key_offset import last_channels, offset_keys
from landmark.attention.rotary import RotaryTables, rotate
from landmark.memory.carried import CarriedStates
from landmark.utils.channels import channels_of


class RecurrentMemory:
    """The last `cache` keys and values of each layer, not rotated and without gradient.

    Every query of a window sees the whole cache and, causally, its own window. Positions are counted from the oldest
    cached key, because only their differences matter.
    """

    def __init__(
        self,
        cache: int,
        rope_base: float | Tensor = 10000.0,
        key_offset: float = 0.0,
        still_layers: Collection[int] = (),
    ):
        """Start with nothing read.

        Args:
            cache: keys and values kept in each layer.
            rope_base, key_offset, still_layers: as in `landmark.memory.Memory`.
        """
        if cache < 0:
            raise ValueError(f"cache must be at least 0 tokens, got {cache}")
        self.cache, self.key_offset = cache, key_offset
        self._rotary_of = RotaryTables(rope_base, still_layers)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new segment begins."""
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_key: dict[int, Tensor] = {}  # the channels that the next token takes (`key_offset`)
        self.carried = CarriedStates()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a window to the cache and to itself.

        Args:
            layer: number of the layer.
            q, k, v: (B, H, T, d), not rotated.

        Returns (B, H, T, d).
        """
        k = self._offset(layer, k)
        if layer in self._kept:
            kept_k, kept_v = self._kept[layer]
            k, v = torch.cat([kept_k, k], 2), torch.cat([kept_v, v], 2)
        self._next[layer] = self._keep(k.detach()), self._keep(v.detach())
        prefix = k.shape[2] - q.shape[2]
        factors = self._rotary_of(layer)(0, k.shape[2], q)
        return causal_attention(rotate(q, factors[prefix:]), rotate(k, factors), v, prefix=prefix)

    def _offset(self, layer: int, k: Tensor) -> Tensor:
        """Keys, some channels from the token before (`key_offset`); those of the last token are kept for the next."""
        channels = channels_of(self.key_offset, k.shape[-1])
        previous, self._last_key[layer] = self._last_key.get(layer), last_channels(k, channels).detach()
        return offset_keys(k, channels, previous=previous)

    def _keep(self, x: Tensor) -> Tensor:
        """The keys or values (B, H, n, d), of those of cache and window, that the next window sees."""
        return x[:, :, max(0, x.shape[2] - self.cache) :]

    def commit(self) -> None:
        """End the window: its last keys and values become the cache of the next one."""
        self._kept, self._next = self._next, {}
        self.carried.commit()


class UnlimitedMemory(RecurrentMemory):
    """The keys and values of a whole text, with which a plain transformer generates; without gradient.

    Keys are rotated once, to their positions in the text, and written to buffers that hold the longest text. So a token
    takes no copy of the keys before it.
    """

    def __init__(
        self,
        tokens: int,
        rope_base: float | Tensor = 10000.0,
        key_offset: float = 0.0,
        still_layers: Collection[int] = (),
    ):
        """Start with nothing read.

        Args:
            tokens: of the longest text.
            rope_base, key_offset, still_layers: as in `landmark.memory.Memory`.
        """
        super().__init__(tokens, rope_base, key_offset, still_layers)

    def reset(self) -> None:
        super().reset()
        self._read = self._length = 0  # tokens of the text so far, and of the present chunk

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a chunk to the text before it and to itself.

        Args:
            layer: number of the layer.
            q, k, v: (B, H, T, d), not rotated.

        Returns (B, H, T, d). Raises ValueError for a text that is longer than the memory.
        """
        start, stop = self._read, self._read + q.shape[2]
        if stop > self.cache:
            raise ValueError(f"the text has {stop} tokens or more, and the memory is for {self.cache}")
        self._length = q.shape[2]
        if layer not in self._kept:
            batch, heads, _, dim = k.shape
            self._kept[layer] = k.new_empty(batch, heads, self.cache, dim), v.new_empty(batch, heads, self.cache, dim)
        keys, values = self._kept[layer]
        factors = self._rotary_of(layer)(start, q.shape[2], q)
        keys[:, :, start:stop] = rotate(self._offset(layer, k), factors)
        values[:, :, start:stop] = v
        return causal_attention(rotate(q, factors), keys[:, :, :stop], values[:, :, :stop], prefix=start)

    def commit(self) -> None:
        """End the chunk: the next one continues the text."""
        self._read, self._length = self._read + self._length, 0
        self.carried.commit()
