"""Landmark memory: read any length in chunks, retrieving a few earlier blocks (paper, Section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from landmark.attention import landmark_attention
from landmark.attention.rotary import RotaryTable, rotate
from landmark.errors import UserError
from landmark.memory.positions import attending_lag, slots
from landmark.memory.reading import read_blocks
from landmark.memory.retrieval import GRANULARITIES, SCORERS, retrieve
from landmark.memory.store import BlockStore

TIERS = ("device",)
Observer = Callable[[int, int, Tensor, BlockStore], None]


class _Layer:
    def __init__(self, store: BlockStore):
        self.store = store
        self.pending: tuple[Tensor, Tensor] | None = None  # (B, H, pending, d), not rotated
        self.chunk: tuple[Tensor, Tensor] | None = None  # pending and chunk, until the commit


class Memory:
    """What a landmark transformer keeps between the chunks of a long input, for all its layers.

    block_size: ℓ, normal tokens a block. max_blocks: most blocks kept, the oldest dropped first (None: all).
    k: blocks retrieved. granularity: between what the retrieved set may differ, "per_token_and_head", "per_head"
    (one set for the chunk's tokens) or "per_token" (one set for the heads). scorer: what ranks blocks, "landmark", or
    the ablations "recent", "random", "mean_key". tier: where blocks are kept. rope_base: of the rotary positions.
    seed: of the scorer "random". tie_layers: layers whose landmarks are all the same vector, so that blocks older than
    the last k tie there and the newer are taken by construction. observer: called at every retrieval with the layer,
    the stream position of the chunk, the ages of the retrieved blocks (B, H or 1, T or 1, q), and the layer's store.

    Raises UserError where a setting is out of range.
    """

    def __init__(
        self,
        block_size: int,
        max_blocks: int | None = None,
        k: int = 4,
        granularity: str = "per_token_and_head",
        scorer: str = "landmark",
        tier: str = "device",
        rope_base: float = 10000.0,
        seed: int = 0,
        tie_layers: tuple[int, ...] = (0,),
        observer: Observer | None = None,
    ):
        check_settings(k=k, max_blocks=max_blocks, granularity=granularity, scorer=scorer, tier=tier)
        if block_size < 1:
            raise UserError(f"model.block_size={block_size}: a block needs at least one token")
        self.block_size, self.max_blocks, self.k = block_size, max_blocks, k
        self.granularity, self.scorer, self.tier = granularity, scorer, tier
        self.seed, self.tie_layers, self.observer = seed, tie_layers, observer
        self._rotary = RotaryTable(rope_base)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new text begins. Statistics start anew too."""
        self.position = 0  # stream positions committed, landmarks included
        self._length = 0  # of the chunk at hand
        self._layers: dict[int, _Layer] = {}
        self._counts = {"chunks": 0, "retrievals": 0, "blocks_retrieved": 0}

    @property
    def stats(self) -> dict[str, Any]:
        """Since the last reset: chunks read; retrievals (choices of a set of blocks) and the blocks they chose, summed
        over layers, samples and whatever the granularity lets differ; blocks and bytes kept now, all layers."""
        stores = [layer.store for layer in self._layers.values()]
        tensors = [x for s in stores for x in (s.keys, s.values, s.landmarks, s.means)]
        return {
            **self._counts,
            "blocks_kept": max((len(s) for s in stores), default=0),
            "bytes_kept": sum(x.numel() * x.element_size() for x in tensors),
        }

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a chunk over itself, the pending tokens before it and the blocks it retrieves.

        q: (B, H, T, d); k, v: (B, H_kv, T, d), not rotated: the memory owns positions. The chunk follows what has
        been committed; a landmark stands wherever the stream position says so. Returns (B, H, T, d).
        """
        state = self._layers.setdefault(layer, _Layer(BlockStore(self.max_blocks, self.scorer == "mean_key")))
        if state.chunk is not None:
            raise RuntimeError(f"layer {layer} has attended to this chunk already: commit() ends a chunk")
        if state.pending is not None:
            k, v = torch.cat([state.pending[0], k], 2), torch.cat([state.pending[1], v], 2)
        state.chunk = k, v
        self._length = q.shape[2]
        pending = self.position % (self.block_size + 1)
        scale = 1 / math.sqrt(q.shape[-1])
        local = self._rotary(0, k.shape[2], q)
        retrieving = self.k > 0 and len(state.store) > 0
        out, lse = landmark_attention(
            rotate(q, local[pending:]),
            rotate(k, local),
            v,
            block_size=self.block_size,
            prefix=pending,
            scale=scale,
            return_lse=True,
        )
        if not retrieving:
            return out
        turned = self._turn(q * scale, pending, state.store.added)
        ages = retrieve(
            turned,
            state.store,
            k=self.k,
            granularity=self.granularity,
            scorer=self.scorer,
            tie=layer in self.tie_layers,
            generator=self._generator(layer, q.device),
        )
        if self.observer is not None:
            self.observer(layer, self.position, ages, state.store)
        self._counts["retrievals"] += ages[..., 0].numel()
        self._counts["blocks_retrieved"] += ages.numel()
        block_out, gates = read_blocks(turned, state.store, ages, attending_lag(ages, self.k, len(turned)))
        weights = torch.cat([lse[..., None], gates.to(lse.dtype)], -1).softmax(-1).to(q.dtype)
        return weights[..., :1] * out + torch.einsum("bhtq,bhtqd->bhtd", weights[..., 1:], block_out)

    def _turn(self, q: Tensor, pending: int, blocks_fed: int) -> Tensor:
        """Queries turned for each lag, (S, B, T, H, d): how far each stands from a block 1…S blocks back."""
        width, queries = self.block_size + 1, q.shape[2]
        depth = slots(blocks_fed, self.k)
        table = self._rotary(0, pending + queries + depth * width, q)
        factors = torch.stack([table[pending + lag * width :][:queries] for lag in range(1, depth + 1)])
        return rotate(q.transpose(1, 2), factors[:, None, :, None])

    def _generator(self, layer: int, device: torch.device) -> torch.Generator:
        seed = hash((self.seed, self.position, layer)) & 0x7FFF_FFFF
        return torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def commit(self) -> None:
        """The chunk is over, in every layer: keep its complete blocks, and the rest as pending. One commit a chunk."""
        width = self.block_size + 1
        for state in self._layers.values():
            if state.chunk is None:
                continue
            k, v = state.chunk
            state.chunk = None
            full = k.shape[2] // width * width
            if full:
                keys = k[:, :, :full].unflatten(2, (-1, width))
                values = v[:, :, :full].unflatten(2, (-1, width))
                state.store.add(rotate(keys, self._rotary(0, width, keys)), values)
            state.pending = k[:, :, full:].clone(), v[:, :, full:].clone()
        self.position += self._length
        self._counts["chunks"] += bool(self._length)
        self._length = 0


def check_settings(*, k: int, max_blocks: int | None, granularity: str, scorer: str, tier: str = "device") -> None:
    """Raise UserError for retrieval settings that mean nothing."""
    if k < 0:
        raise UserError(f"retrieval.k={k}: the number of retrieved blocks cannot be negative")
    if max_blocks is not None and max_blocks < max(k, 1):
        raise UserError(
            f"memory.blocks={max_blocks} is less than retrieval.k={k}: keep at least as many blocks as are retrieved"
        )
    for name, value, known in (
        ("retrieval.granularity", granularity, GRANULARITIES),
        ("retrieval.scorer", scorer, SCORERS),
        ("memory.tier", tier, TIERS),
    ):
        if value not in known:
            raise UserError(f"{name}={value}: must be one of {', '.join(known)}")
