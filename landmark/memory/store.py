"""The blocks that one attention layer keeps: a ring of the newest ones, or all of them."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockStore:
    """Keys, values and landmark keys of complete blocks.

    Keys are stored turned by their offsets 0…ℓ within the block (see `landmark.attention.rotary`), so they are never
    turned again. Block number n, counted from the first ever added, stands in row n mod capacity; without a limit the
    capacity doubles when it is full. A landmark's value is never used and not kept.

    keys, values: (B, H, capacity, ℓ, d); landmarks and, if asked for, means (the mean of a block's keys):
    (B, H, capacity, d).
    """

    def __init__(self, max_blocks: int | None, keep_means: bool = False):
        self.max_blocks = max_blocks
        self.keep_means = keep_means
        self.added = 0  # blocks ever added
        self.blocks_read = 0  # a block of one head counts each time that it is read
        self.capacity = 0
        self.keys = self.values = self.landmarks = self.means = torch.empty(0)

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Append n blocks, oldest first. keys, values: (B, H, n, W, d), keys turned by their offsets."""
        count = keys.shape[2]
        if self.max_blocks is not None and count > self.max_blocks:
            self.added += count - self.max_blocks
            keys, values = keys[:, :, -self.max_blocks :], values[:, :, -self.max_blocks :]
            count = self.max_blocks
        if count == 0:
            return
        self._reserve(min(self.added + count, self.max_blocks or self.added + count), keys)
        rows = torch.arange(self.added, self.added + count, device=keys.device) % self.capacity
        self.keys[:, :, rows] = keys[:, :, :, :-1]
        self.values[:, :, rows] = values[:, :, :, :-1]
        self.landmarks[:, :, rows] = keys[:, :, :, -1]
        if self.keep_means:
            self.means[:, :, rows] = keys[:, :, :, :-1].mean(3)
        self.added += count

    def _reserve(self, blocks: int, like: Tensor) -> None:
        if blocks <= self.capacity:
            return
        batch, heads, _, width, dim = like.shape
        capacity = self.max_blocks or max(64, 1 << (blocks - 1).bit_length())

        def grown(old: Tensor, *tail: int) -> Tensor:
            new = like.new_empty(batch, heads, capacity, *tail)
            if self.capacity:
                new[:, :, : self.capacity] = old
            return new

        self.keys = grown(self.keys, width - 1, dim)
        self.values = grown(self.values, width - 1, dim)
        self.landmarks = grown(self.landmarks, dim)
        if self.keep_means:
            self.means = grown(self.means, dim)
        self.capacity = capacity

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of one block and head."""
        return 2 * self.keys[:1, :1, :1].numel() * self.keys.element_size()

    def read_keys(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Keys (n, ℓ, d) of blocks. places: (n,), among all samples, heads and rows, (B, H, capacity) flattened."""
        self.blocks_read += len(places)
        return torch.index_select(self.keys.flatten(0, 2), 0, places, out=out)

    def read_values(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Values (n, ℓ, d) of blocks, of those whose keys are read."""
        return torch.index_select(self.values.flatten(0, 2), 0, places, out=out)

    def read_landmarks(self, places: Tensor) -> Tensor:
        """Landmarks' keys (n, d) of blocks."""
        return self.landmarks.flatten(0, 2).index_select(0, places)

    def ages(self) -> Tensor:
        """Age of the block in each row that is in use, (len,): 1 for the newest."""
        rows = torch.arange(len(self), device=self.keys.device)
        return (self.added - 1 - rows) % max(1, self.capacity) + 1

    def rows(self, ages: Tensor) -> Tensor:
        """The inverse of `ages`: in which row stands the block of that age."""
        return (self.added - ages) % max(1, self.capacity)
