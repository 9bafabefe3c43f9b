"""Blocks that all queries read, of a head or of heads that choose together: fetched once, and attended to as they are.

S: number of lags. C: sets of blocks, of which each belongs to H/C query heads: to one, or to those that share keys. q:
blocks of a set.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from landmark.attention import Grouped
from landmark.attention.flash import attention_forward
from landmark.attention.scoring import capped
from landmark.memory.query_tiles import for_each_head
from landmark.memory.store import BlockStore
from landmark.memory.store.tiers import Fetched


class SharedBlocks(NamedTuple):
    """Fetched blocks and their queries.

    q: (B, C, q, H/C·T, d), rotated for each block. gates: (B, H, T, q), scores of the landmarks. blocks: B·C·q.
    shape: (B, C, q, H/C, T).
    """

    q: Tensor
    gates: Tensor
    blocks: Fetched
    shape: tuple[int, ...]

    @classmethod
    def fetch(
        cls, queries: Tensor, store: BlockStore, ages: Tensor, lags: Tensor, softcap: float | None
    ) -> SharedBlocks:
        """Fetch them.

        Args:
            queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
            store: the layer's blocks.
            ages: (B, H, H_kv or 1, 1, q), the blocks; 1 is the newest.
            lags: shape of ages, the lag of each block.
            softcap: cap of the landmarks' scores; None: there is none.
        """
        _, batch, length, heads, dim = queries.shape
        ages, lags = (for_each_head(x, max(x.shape[1], store.kv_heads))[:, :, 0] for x in (ages, lags))
        sets, count = ages.shape[1:]
        device = queries.device
        samples = torch.arange(batch, device=device)[:, None, None]
        q = queries.unflatten(3, (sets, -1)).permute(0, 1, 3, 4, 2, 5)  # (S, B, C, H/C, T, d)
        q = q[lags - 1, samples, torch.arange(sets, device=device)[None, :, None]].flatten(3, 4)
        first = torch.arange(0, batch * store.kv_heads * store.capacity, store.capacity, device=device)
        places = (for_each_head(first.view(batch, -1, 1), sets) + store.rows(ages)).flatten()
        shape = batch, sets, count, heads // sets, length
        landmarks = store.read_landmarks(places).view(batch, sets, count, dim, 1)
        gates = of_queries(capped((q.to(landmarks.dtype) @ landmarks)[..., 0], softcap), shape)
        return cls(q, gates, store.fetch(places), shape)


def of_queries(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers (B, C, q, H/C·T), or in any shape with as many, → (B, H, T, q). shape: as of `SharedBlocks`."""
    return x.reshape(shape).permute(0, 1, 3, 4, 2).flatten(1, 2)


def weights_of_shared(queries: Tensor, store: BlockStore, ages: Tensor, lags: Tensor, softcap: float | None) -> Tensor:
    """s_b + log Σ_j exp s_j of each query and block, (B, H, T, q), in the type of landmarks.

    Args: as of `SharedBlocks.fetch`; the cap is of all scores.
    """
    shared = SharedBlocks.fetch(queries, store, ages, lags, softcap)
    keys = shared.blocks.read_keys()
    scores = capped(torch.bmm(shared.q.flatten(0, 2), keys.mT), softcap)
    return shared.gates + of_queries(scores.to(shared.gates.dtype).logsumexp(-1), shared.shape)


def attend_shared(
    queries: Tensor, store: BlockStore, ages: Tensor, lags: Tensor, softcap: float | None, gate: Grouped
) -> tuple[Tensor, Tensor]:
    """Plain attention to each block.

    Args: as of `SharedBlocks.fetch`; the cap is of all scores. gate: how a block weighs.

    Returns outputs (B, C, q, H/C, T, d) and gates (B, H, T, q).
    """
    shared = SharedBlocks.fetch(queries, store, ages, lags, softcap)
    keys, values = shared.blocks.read_keys()[:, None], shared.blocks.read_values()[:, None]
    q = shared.q.flatten(0, 2)[:, None]
    out, lse = attention_forward(q, keys, values, scale=1.0, softcap=softcap)
    gates = gate.of_blocks(shared.gates, lambda: of_queries(lse, shared.shape))
    return out.view(*shared.shape, -1), gates
