"""A cache on the compute device of blocks fetched from a slower tier; the least recently used are dropped first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landmark.memory.store.buffers import new_buffer
from landmark.memory.store.transfer import Read, Transfer


@dataclass
class TierCounts:
    """Counts of blocks fetched from a slower tier.

    cache_hits, cache_misses: blocks of one head. bytes_moved: bytes copied to the compute device. seconds_waited: time
    that the CPU or the GPU waited for them.
    """

    cache_hits: int = 0
    cache_misses: int = 0
    bytes_moved: int = 0
    seconds_waited: float = 0.0


class BlockCache:
    """Slots for blocks of one head on the compute device; the CPU knows which block each slot holds.

    keys, values: (slots, ℓ, d). A *place* is the index of a block of one head among all rows, samples and heads. Where
    one fetch needs more blocks than there are slots, the missing blocks bypass the cache.

    like: (B, H, n, ℓ, d), a tensor with the blocks' shape, type and device.
    """

    def __init__(self, slots: int, like: Tensor):
        self.keys, self.values = new_buffer(2, slots, *like.shape[3:], dtype=like.dtype, device=like.device)
        self._transfer = Transfer(like)
        self._slot_of = np.empty(0, np.int32)  # by place; −1: not in the cache
        self._place_of = np.full(slots, -1)
        self._used = np.zeros(slots, np.int64)  # by slot: the number of the last fetch that used it; 0: free
        self._clock = 0

    @property
    def bytes_kept(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, places: int) -> None:
        self._slot_of = np.append(self._slot_of, np.full(places - len(self._slot_of), -1, np.int32))

    def forget(self, first: int, stop: int) -> None:
        """Drop the blocks at places first … stop−1, which are about to be overwritten."""
        slots = self._slot_of[first:stop]
        here = slots[slots >= 0]
        self._place_of[here], self._used[here] = -1, 0
        slots[:] = -1

    def fetch(self, places: np.ndarray, read: Read, counts: TierCounts) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (m, ℓ, d) among which are the blocks at these places (n,), and the index of each block, (n,).

        read: reads blocks from the slower tier. counts: are updated.
        """
        distinct, index = np.unique(places, return_inverse=True)
        slots = self._slot_of[distinct]
        missing = np.flatnonzero(slots < 0)
        found = slots[slots >= 0]
        counts.cache_hits += len(found)
        counts.cache_misses += len(missing)
        self._clock += 1
        self._used[found] = self._clock
        keys, values = self.keys, self.values
        if len(distinct) > len(self._used):
            keys, values = (x.new_empty(len(distinct), *x.shape[1:]) for x in (keys, values))
            here = self._on_device(np.flatnonzero(slots >= 0))
            keys[here], values[here] = (x[self._on_device(found)] for x in (self.keys, self.values))
            slots = np.arange(len(distinct))
        elif len(missing):
            slots[missing] = self._free(len(missing))
        if len(missing):
            into = self._on_device(slots[missing])
            moved, waited = self._transfer(read, torch.from_numpy(distinct[missing]), keys, values, into)
            counts.bytes_moved += moved
            counts.seconds_waited += waited
            if keys is self.keys:  # only now: a transfer that fails leaves nothing that looks like a block
                self._slot_of[distinct[missing]], self._place_of[slots[missing]] = slots[missing], distinct[missing]
                self._used[slots[missing]] = self._clock
        return keys, values, self._on_device(slots[index])

    def _free(self, count: int) -> np.ndarray:
        """The least recently used slots, freed; the present fetch does not use them."""
        slots = np.argpartition(self._used, count - 1)[:count]
        before = self._place_of[slots]
        self._slot_of[before[before >= 0]] = -1
        self._place_of[slots], self._used[slots] = -1, 0
        return slots

    def _on_device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.keys.device, non_blocking=True)
