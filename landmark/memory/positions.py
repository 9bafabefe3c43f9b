"""Stingy position mapping (paper, Section 3.2.1, Figure 2), in lags.

The paper allots S = min(blocks fed, k+1) slots of W = ℓ+1 positions before the chunk's own block and stands each
block it scores, or attends to, in one of them. Only distances matter to rotary positions, and the distance from a
query that is i positions past the start of the first incomplete block to offset o of a block in slot s is
i − o + (S−s)·W. So everything is said by the *lag* S−s: 1 is the block just before, S the one furthest back.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAPPINGS = ("stingy", "true")


def slots(blocks_fed: int, k: int) -> int:
    """S: how many blocks deep the mapped past is; blocks that were dropped since count as fed."""
    return min(blocks_fed, k + 1)


def scoring_lag(age: Tensor, k: int, slots: int) -> Tensor:
    """Lag at which a block's landmark is scored; age 1 is the newest block. The last k keep their distance, all older
    ones share the furthest slot."""
    return torch.where(age <= k, age, slots)


def attending_lag(age: Tensor, k: int, slots: int) -> Tensor:
    """Lag at which retrieved blocks are attended to.

    age: (…, q), the q retrieved blocks, oldest first. Those older than the last k fill the slots from the left, the
    others end at the chunk; where both kinds are there an empty slot may part them.
    """
    retrieved = age.shape[-1]
    rank = torch.arange(retrieved, device=age.device)
    return torch.where(age > k, slots - rank, retrieved - rank)
