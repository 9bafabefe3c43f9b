"""Memories of models without landmarks: the last keys (Transformer-XL, Dai et al. 2019), the first and last, or all."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from landmark.attention.keys import Keys
from landmark.attention.plain import causal_attention
from landmark.attention.rotary import rotate
from landmark.memory.text_memory import Piece, equal_pieces


class RecurrentMemory:
    """The last `cache` keys and values of each layer, not rotated and without gradient.

    Every query of a window sees the whole cache and, causally, its own window. Positions are counted from the oldest
    cached key, because only their differences matter.
    """

    block_size = None  # as of a `Memory`: it has no blocks

    def __init__(self, cache: int, keys: Keys | None = None):
        """Start with nothing read. keys: how keys are made; None: with rotary positions."""
        if cache < 0:
            raise ValueError(f"cache must be at least 0 tokens, got {cache}")
        self.cache, self.keys = cache, keys or Keys()
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new segment begins."""
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_key: dict[int, Tensor] = {}  # the channels that the next token takes (`Keys.offset`)

    def pieces(self, length: int, kept: int, most: Callable[[], int], device: str) -> Iterator[Piece]:
        """As of `TextMemory`: `equal_pieces`."""
        return equal_pieces(length, most)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention (B, H, T, d) of a window to the cache and to itself. q, k, v: (B, H, T, d), not rotated."""
        k = self._shifted(layer, k)
        if layer in self._cached:
            cached_k, cached_v = self._cached[layer]
            k, v = torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2)
        self._next[layer] = self._newest(k.detach()), self._newest(v.detach())
        prefix = k.shape[2] - q.shape[2]
        factors = self.keys.rotary(layer)(0, k.shape[2], q)
        return causal_attention(rotate(q, factors[prefix:]), rotate(k, factors), v, prefix=prefix)

    def _shifted(self, layer: int, k: Tensor) -> Tensor:
        """Keys, some channels from the token before; those of the last token are for the next one."""
        previous, last = self._last_key.get(layer), self.keys.last(k)
        if last is not None:
            self._last_key[layer] = last.detach()
        return self.keys.shifted(k, previous=previous)

    def _newest(self, x: Tensor) -> Tensor:
        """The keys or values (B, H, n, d) of cache and window that the next window sees."""
        return x[:, :, max(0, x.shape[2] - self.cache) :]

    def commit(self) -> None:
        """End the window: its last keys and values become the cache of the next one."""
        self._cached, self._next = self._next, {}


class UnlimitedMemory(RecurrentMemory):
    """The keys and values of a whole text, with which a plain transformer generates; without gradient.

    Keys are rotated once, to their positions in the text, and written to buffers that hold the longest text, of `cache`
    tokens. So a token takes no copy of the keys before it.
    """

    def reset(self) -> None:
        super().reset()
        self._read = self._length = 0  # tokens of the text so far, and of the present chunk

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to the text so far. Args: as of `RecurrentMemory.attend`. Raises ValueError for a longer text."""
        start, stop = self._read, self._read + q.shape[2]
        if stop > self.cache:
            raise ValueError(f"the text has {stop} tokens or more, and the memory is for {self.cache}")
        self._length = q.shape[2]
        if layer not in self._cached:
            batch, heads, _, dim = k.shape
            self._cached[layer] = k.new_empty(batch, heads, self.cache, dim), v.new_empty(batch, heads, self.cache, dim)
        keys, values = self._cached[layer]
        factors = self.keys.rotary(layer)(start, q.shape[2], q)
        keys[:, :, start:stop] = rotate(self._shifted(layer, k), factors)
        values[:, :, start:stop] = v
        return causal_attention(rotate(q, factors), keys[:, :, :stop], values[:, :, :stop], prefix=start)

    def commit(self) -> None:
        """End the chunk: the next one continues the text."""
        self._read, self._length = self._read + self._length, 0


class SinkMemory(RecurrentMemory):
    """The first `sinks` and the last `window` keys and values of each layer, not rotated (Xiao et al. 2023).

    Positions are counted within the cache: the dropped keys between sinks and window leave no gap.
    """

    def __init__(self, window: int, sinks: int = 4, keys: Keys | None = None):
        """Start with nothing read. window, sinks: last and first keys of each layer that are cached."""
        if sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {sinks}")
        self.sinks = sinks
        super().__init__(window, keys)

    @property
    def stats(self) -> dict[str, int]:
        """keys_kept: keys in a layer, now. bytes_kept: bytes of all layers."""
        cached = [x for pair in self._cached.values() for x in pair]
        return {"keys_kept": max((x.shape[2] for x in cached), default=0), "bytes_kept": sum(x.nbytes for x in cached)}

    def _newest(self, x: Tensor) -> Tensor:
        if x.shape[2] <= self.sinks + self.cache:
            return x
        return torch.cat([x[:, :, : self.sinks], super()._newest(x)], 2)
