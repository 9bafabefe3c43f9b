"""Stingy position mapping (paper, Section 3.2.1, Figure 2), in lags.

The paper allots k+1 slots of W = ℓ+1 positions before the first incomplete block, and puts each block that is scored
or attended to into one of them. Here there are S = min(blocks fed, k+1) slots, so that up to k blocks have their true
positions. Rotary positions depend on distances alone. From a query that is i positions past the start of the first
incomplete block, offset o of a block in slot s is i − o + (S−s)·W positions away. So only the *lag* S−s is needed: 1 is
the slot just before the incomplete block, S the furthest one. The *age* of a block is 1 for the newest block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.rotary import RotaryTable, rotate
from landmark.memory.cutoff import QuerySelection


def slots(blocks_fed: int, k: int) -> int:
    """S, the number of slots. blocks_fed: complete blocks before the chunk, dropped ones included."""
    return min(blocks_fed, k + 1)


def lag_distances(blocks_fed: int, k: int, width: int, mapping: str) -> list[int]:
    """For each lag 1…S the number of positions from the start of its slot to the first pending token.

    With true positions keys are stored rotated to their own position, and one distance serves all blocks.

    Args:
        blocks_fed: complete blocks before the chunk, dropped ones included.
        k: blocks retrieved.
        width: W = ℓ+1, positions of a block.
        mapping: "stingy" or "true".
    """
    if mapping == "true":
        return [blocks_fed * width] if blocks_fed else []
    return [lag * width for lag in range(1, slots(blocks_fed, k) + 1)]


def scoring_lag(age: Tensor, k: int, slots: int) -> Tensor:
    """The lag at which a block's landmark is scored: for the last k blocks their age, for older ones the furthest."""
    return torch.where(age <= k, age, slots)


def attending_lag(age: Tensor, k: int, slots: int) -> Tensor:
    """The lags at which retrieved blocks are attended to.

    age: (…, q), of the q retrieved blocks, oldest first. Blocks older than the last k fill the slots from the furthest
    on, the others fill the slots nearest to the chunk. There may be an empty slot between the two kinds.
    """
    retrieved = age.shape[-1]
    lag = torch.arange(retrieved, 0, -1, device=age.device)
    return lag.expand(age.shape) if slots == retrieved else lag + (age > k) * (slots - retrieved)


def rotate_queries(
    q: Tensor, rotary: RotaryTable, pending: int, distances: list[int], selection: QuerySelection | None
) -> Tensor:
    """Queries rotated for each lag, (S, B, T or n, H, d); n: the queries of a selection.

    Args:
        q: (B, H, T, d), not rotated.
        rotary: the rotary positions.
        pending: number of pending tokens before the first query.
        distances: positions of each lag, from `lag_distances`.
        selection: the queries that retrieve; None: all.
    """
    queries = q.shape[2]
    if selection is None or selection.indices is None:
        factors = rotary.several([pending + distance for distance in distances], queries, q)[:, None, :, None]
    else:
        table = rotary(0, pending + queries + distances[-1], q)
        position = selection.indices.transpose(1, 2) + pending
        factors = torch.stack([table[position + distance] for distance in distances])
        q = selection.gather(q)
    q = q.transpose(1, 2)
    lags = len(factors)
    factors = factors.expand(-1, len(q), *factors.shape[2:]).flatten(1, 2)  # (S, B·T, H or 1, d/2)
    return rotate(q.flatten(0, 1).expand(lags, -1, -1, -1), factors).unflatten(1, q.shape[:2])
