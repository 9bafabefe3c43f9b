"""Stingy position mapping (paper, Section 3.2.1, Figure 2), in lags.

The paper allots S = min(blocks fed, k+1) slots of W = ℓ+1 positions before the chunk's own block and puts each block
that is scored, or attended to, into one of them. Rotary positions depend on distances alone, and the distance from a
query that is i positions past the start of the first incomplete block to offset o of a block in slot s is
i − o + (S−s)·W. So the *lag* S−s is all that is needed: 1 is the slot just before the chunk, S the one furthest back.
The *age* of a block counts from the newest block kept, which has age 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.rotary import RotaryTable, rotate
from landmark.memory.cutoff import QuerySelection


def slots(blocks_fed: int, k: int) -> int:
    """S: how many blocks deep the mapped past is; dropped blocks count as fed."""
    return min(blocks_fed, k + 1)


def lag_distances(blocks_fed: int, k: int, width: int, mapping: str) -> list[int]:
    """Positions from the start of the slot of lag 1…S to the first pending token, for each lag.

    With true positions keys are stored at their own, so that one distance serves all blocks.

    Args:
        blocks_fed: complete blocks before the chunk, dropped ones counted.
        k: blocks retrieved.
        width: W = ℓ+1, positions of a block.
        mapping: "stingy" or "true".
    """
    if mapping == "true":
        return [blocks_fed * width] if blocks_fed else []
    return [lag * width for lag in range(1, slots(blocks_fed, k) + 1)]


def scoring_lag(age: Tensor, k: int, slots: int) -> Tensor:
    """Lag at which a block's landmark is scored. The last k keep their distance, all older ones share the furthest
    slot."""
    return torch.where(age <= k, age, slots)


def attending_lag(age: Tensor, k: int, slots: int) -> Tensor:
    """Lag at which retrieved blocks are attended to.

    age: (…, q), the q retrieved blocks, oldest first. Blocks older than the last k fill the slots from the left, the
    others end at the chunk; where both kinds are retrieved an empty slot may stand between them.
    """
    retrieved = age.shape[-1]
    rank = torch.arange(retrieved, device=age.device)
    return torch.where(age > k, slots - rank, retrieved - rank)


def rotate_queries(
    q: Tensor, rotary: RotaryTable, pending: int, distances: list[int], selection: QuerySelection | None
) -> Tensor:
    """Queries rotated for each lag, (S, B, T or n, H, d); n are those that are searched for.

    Args:
        q: (B, H, T, d), not rotated.
        rotary: the rotary positions.
        pending: pending tokens, which stand before the first query.
        distances: of each lag, see `lag_distances`.
        selection: the queries that retrieve; None: all.
    """
    queries = q.shape[2]
    table = rotary(0, pending + queries + distances[-1], q)
    if selection is None or selection.indices is None:
        factors = torch.stack([table[pending + distance :][:queries] for distance in distances])[:, None, :, None]
    else:
        position = selection.indices.transpose(1, 2) + pending
        factors = torch.stack([table[position + distance] for distance in distances])
        q = selection.gather(q)
    return rotate(q.transpose(1, 2), factors)
