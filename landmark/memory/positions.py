"""Positions of blocks in memory: stingy (paper, Section 3.2.1, Figure 2), or true ones (Figure 6).

The paper allots k+1 slots of W = ℓ+1 positions before the first incomplete block, and puts each block that is scored
or attended to into one of them. Here there are S = min(blocks fed, k+1) slots, so that up to k blocks have their true
positions. Rotary positions depend on distances alone. From a query that is i positions past the start of the first
incomplete block, offset o of a block in slot s is i − o + (S−s)·W positions away. So only the *lag* S−s is needed: 1 is
the slot just before the incomplete block, S the furthest one. The *age* of a block is 1 for the newest block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from landmark.attention.rotary import RotaryTable


@dataclass(frozen=True)
class Lags:
    """The lags of the blocks of a layer, for the queries of one chunk.

    own: of the newest blocks, how many have a lag of their own when they are scored; all older ones share the furthest.
    distances: for each lag 1…S the number of positions from the start of its slot to the first pending token.
    """

    own: int
    distances: tuple[int, ...]

    def scoring(self, ages: Tensor) -> Tensor:
        """The lag at which the landmark of a block of each age is scored."""
        return torch.where(ages <= self.own, ages, len(self.distances))

    def attending(self, ages: Tensor) -> Tensor:
        """The lags at which retrieved blocks are attended to, of ages (…, q), oldest first.

        Blocks that share a lag when they are scored fill the slots from the furthest on, the others fill the slots
        nearest to the chunk. There may be an empty slot between the two kinds.
        """
        if not self.own:
            return torch.ones_like(ages)
        slots, retrieved = len(self.distances), ages.shape[-1]
        lag = torch.arange(retrieved, 0, -1, device=ages.device)
        return lag.expand(ages.shape) if slots == retrieved else lag + (ages > self.own) * (slots - retrieved)


@dataclass(frozen=True)
class Stingy:
    """The paper's mapping: k+1 slots for all blocks."""

    name: ClassVar[str] = "stingy"

    def lags(self, blocks_fed: int, k: int, width: int) -> Lags:
        """The lags for a chunk. blocks_fed: complete blocks before it, dropped ones included."""
        return Lags(k, tuple(lag * width for lag in range(1, min(blocks_fed, k + 1) + 1)))

    def stored(self, rotary: RotaryTable, blocks_fed: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The factors that rotate keys like (…, d) of new blocks, (n or 1, W, d/2): each by its offset in its block.

        shape: n and W, of the new blocks.
        """
        return rotary(0, shape[1], like)[None]


@dataclass(frozen=True)
class TruePositions:
    """True positions, for which a model must be trained: keys are stored rotated to their own, one lag serves all."""

    name: ClassVar[str] = "true"

    def lags(self, blocks_fed: int, k: int, width: int) -> Lags:
        return Lags(0, (blocks_fed * width,) if blocks_fed else ())

    def stored(self, rotary: RotaryTable, blocks_fed: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """As of `Stingy`, by the positions of keys in the text."""
        return rotary(blocks_fed * shape[1], shape[0] * shape[1], like).unflatten(0, shape)


Positions = Stingy | TruePositions
