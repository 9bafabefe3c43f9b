"""The blocks that one attention layer keeps: a ring of the newest ones, or all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from landmark.memory.block_files import Saved
from landmark.memory.tiers import Blocks, DeviceBlocks, Fetched, Tier

if TYPE_CHECKING:
    from landmark.memory.index import LandmarkIndex


class LayerMemory:
    """What is kept for one layer. index: of its landmarks, where they are not scanned."""

    def __init__(self, store: BlockStore, index: LandmarkIndex | None = None):
        self.store, self.index = store, index
        self.pending: tuple[Tensor, Tensor] | None = None  # (B, H, pending, d), not rotated
        self.chunk: tuple[Tensor, Tensor] | None = None  # pending and chunk, until the commit


class BlockStore:
    """Keys, values and landmark keys of complete blocks.

    Keys are stored turned by their offsets 0…ℓ within the block (see `landmark.attention.rotary`), so they are never
    turned again. Block number n, counted from the first ever added, stands in row n mod capacity; without a limit the
    capacity doubles when it is full. A landmark's value is never used and not kept.

    landmarks and, if asked for, means (the mean of a block's keys): (B, H, capacity, d), on the compute device. Keys
    and values lie where the tier says (tiers.py).
    """

    def __init__(self, max_blocks: int | None, keep_means: bool = False, tier: Tier | None = None):
        self.max_blocks = max_blocks
        self.keep_means = keep_means
        self.tier = tier or Tier()
        self.added = 0  # blocks ever added
        self.blocks_read = 0  # a block of one head counts each time that it is read
        self.capacity = 0
        self.landmarks = self.means = torch.empty(0)
        self.blocks: Blocks = DeviceBlocks()

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Append n blocks, oldest first. keys, values: (B, H, n, W, d), keys turned by their offsets.

        Raises UserError where the tier has no room for them.
        """
        count = keys.shape[2]
        if self.max_blocks is not None and count > self.max_blocks:
            self.added += count - self.max_blocks
            keys, values = keys[:, :, -self.max_blocks :], values[:, :, -self.max_blocks :]
            count = self.max_blocks
        if count == 0:
            return
        self.reserve(min(self.added + count, self.max_blocks or self.added + count), keys[..., 1:, :])
        for row, part in self.runs(self.added, count):
            block_keys = keys[:, :, part, :-1]
            self.blocks.write(row, block_keys, values[:, :, part, :-1])
            rows = slice(row, row + block_keys.shape[2])
            self.landmarks[:, :, rows] = keys[:, :, part, -1]
            if self.keep_means:
                self.means[:, :, rows] = block_keys.mean(3)
        self.added += count

    def reserve(self, blocks: int, like: Tensor, saved: Saved | None = None) -> None:
        """Make room for so many blocks. like: some of them, (B, H, n, ℓ, d). saved: the first of them, where they are
        on disk already."""
        if blocks <= self.capacity:
            return
        (batch, heads), dim = like.shape[:2], like.shape[-1]
        capacity = self.max_blocks or max(64, 1 << (blocks - 1).bit_length())
        if not self.capacity:
            self.blocks = self.tier.blocks(like, saved)
        self.blocks.reserve(capacity)

        def grown(old: Tensor) -> Tensor:
            new = like.new_empty(batch, heads, capacity, dim)
            if self.capacity:
                new[:, :, : self.capacity] = old
            return new

        self.landmarks = grown(self.landmarks)
        if self.keep_means:
            self.means = grown(self.means)
        self.capacity = capacity

    def runs(self, first: int, count: int) -> Iterator[tuple[int, slice]]:
        """Blocks number first … first+count−1 as neighbouring rows: the first row, and which of the blocks."""
        done = 0
        while done < count:
            row = (first + done) % self.capacity
            length = min(count - done, self.capacity - row)
            yield row, slice(done, done + length)
            done += length

    @property
    def kv_heads(self) -> int:
        return self.landmarks.shape[1]

    @property
    def block_shape(self) -> torch.Size:
        """(ℓ, d), of the keys of one block and head, as of its values."""
        return self.blocks.block_shape

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of one block and head."""
        return 2 * self.block_shape.numel() * self.landmarks.element_size()

    @property
    def bytes_kept(self) -> int:
        return self.blocks.bytes_kept + self.landmarks.nbytes + self.means.nbytes

    @property
    def device_bytes_kept(self) -> int:
        """Of `bytes_kept`, those on the compute device; a cache of blocks fetched from elsewhere included."""
        return self.blocks.device_bytes_kept + self.landmarks.nbytes + self.means.nbytes

    def fetch(self, places: Tensor) -> Fetched:
        """Bring blocks to the compute device. places: (n,), among all samples, heads and rows, (B, H, capacity)
        flattened. Raises UserError where their file is gone."""
        self.blocks_read += len(places)
        return self.blocks.fetch(places)

    def read_landmarks(self, places: Tensor) -> Tensor:
        """Landmarks' keys (n, d) of blocks."""
        return self.landmarks.flatten(0, 2).index_select(0, places)

    def ages(self) -> Tensor:
        """Age of the block in each row that is in use, (len,): 1 for the newest."""
        rows = torch.arange(len(self), device=self.landmarks.device)
        return (self.added - 1 - rows) % max(1, self.capacity) + 1

    def rows(self, ages: Tensor) -> Tensor:
        """The inverse of `ages`: in which row stands the block of that age."""
        return (self.added - ages) % max(1, self.capacity)
