"""Landmark memory: read any length in chunks, retrieving a few earlier blocks (paper, Section 3.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landmark.attention import backend_for, landmark_attention
from landmark.attention.context_miss import miss_scores
from landmark.attention.flash import attention_forward
from landmark.attention.rotary import RotaryTable, rotate, rotate_cmt
from landmark.memory.block_attention import read_blocks, read_blocks_fused
from landmark.memory.block_store import BlockStore, LayerMemory
from landmark.memory.counters import MemoryStatistics, with_rates
from landmark.memory.index import LandmarkIndex, retrieve_candidates
from landmark.memory.lookups import Lookups, lookups
from landmark.memory.observer import Observer, Retrieval
from landmark.memory.positions import attending_lag, slots
from landmark.memory.retrieval import retrieve
from landmark.memory.saving import load, save
from landmark.memory.settings import check_settings
from landmark.memory.tiers import Tier
from landmark.utils.errors import UserError


class Memory:
    """What a landmark transformer keeps between the chunks of a long input, for all its layers.

    block_size: ℓ, normal tokens a block. max_blocks: most blocks kept, the oldest dropped first (None: all).
    k: blocks retrieved. granularity: between what the retrieved set may differ, "per_token_and_head", "per_head"
    (one set for the chunk's tokens) or "per_token" (one set for the heads). scorer: what ranks blocks, "landmark", or
    the ablations "recent", "random", "mean_key". tier: where blocks are kept, "device", "cpu" or "disk" (tiers.py),
    with the same results, bit for bit. rope_base: of the rotary positions, or the radians a position (d/2,) by which
    each pair turns.
    seed: of the scorer "random". tie_layers: layers whose landmarks are all the same vector, so that blocks older than
    the last k tie there and the newer are taken by construction. cutoff: where the context miss token weighs less,
    nothing is looked up; one number, or one for each layer. mapping: "stingy" (Section 3.2.1), or "true" positions,
    which a model must be trained for. observer: called with a `Retrieval` whenever a layer attends (observing.py).
    folder: where the tier "disk" has its files, which have no name and end with the process (None: the system's for
    temporary ones). cache: blocks of each layer, all heads, that the device holds of those fetched from another tier,
    those used least recently going first. model: tells one model from others, when a memory is saved or loaded.
    backend: of `landmark.attention`; with "triton", or "auto" on a GPU, one kernel reads the retrieved blocks. index:
    "exact" scans all landmarks; "faiss" has only `candidates` of the older ones for each query, from an index of
    `index_type` "ivf", which is approximate, or "flat" (index.py).

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
        rope_base: float | Tensor = 10000.0,
        seed: int = 0,
        tie_layers: tuple[int, ...] = (0,),
        cutoff: float | Sequence[float] = 0.0,
        mapping: str = "stingy",
        observer: Observer | None = None,
        folder: Path | str | None = None,
        cache: int = 128,
        model: Callable[[], str] | None = None,
        backend: str = "auto",
        index: str = "exact",
        index_type: str = "ivf",
        candidates: int = 16,
    ):
        check_settings(
            k=k,
            max_blocks=max_blocks,
            granularity=granularity,
            scorer=scorer,
            tier=tier,
            cutoff=cutoff,
            mapping=mapping,
            cache=cache,
            index=index,
            index_type=index_type,
            candidates=candidates,
        )
        if block_size < 1:
            raise UserError(f"model.block_size={block_size}: a block needs at least one token")
        self.block_size, self.max_blocks, self.k = block_size, max_blocks, k
        self.granularity, self.scorer, self.tier = granularity, scorer, tier
        self.cutoff, self.mapping = cutoff, mapping
        self.seed, self.observer, self.model, self.backend = seed, observer, model, backend
        self.folder, self.cache = None if folder is None else Path(folder), cache
        self.index, self.index_type, self.candidates = index, index_type, candidates
        self.tie_layers = tie_layers if mapping == "stingy" else ()
        self.rope_base = rope_base.tolist() if isinstance(rope_base, Tensor) else rope_base
        self._rotary = RotaryTable(rope_base)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new text begins. Statistics start anew too."""
        self.position = 0  # stream positions committed, landmarks included
        self._length = 0  # of the chunk at hand
        self.layers: dict[int, LayerMemory] = {}
        self._statistics = MemoryStatistics()
        self._tier = Tier(self.tier, self.folder, self.cache)

    @property
    def stats(self) -> dict[str, Any]:
        """Since the last reset: chunks read; searches, one a chunk and layer that finds blocks kept, and
        searches_skipped, where no query needed one; seconds_searching, on a GPU only those of giving it orders;
        lookups, queries of heads that read blocks; retrievals (choices of a set of blocks) and the blocks they chose,
        summed over layers, samples and whatever the granularity lets differ; blocks_read and bytes_read, of heads, by
        those who attend to them; blocks and bytes kept now, all layers, and those bytes that are on the compute device.

        With another tier than the device also cache_hits and cache_misses, of the blocks of one head, bytes_moved to
        the device, and seconds_waited for that.

        With a context miss token also, of each layer and head, the lookups that were possible and those dropped, and
        the rates of `landmark.memory.counters.with_rates`."""
        stores = [layer.store for layer in self.layers.values()]
        return with_rates(
            {
                **self._statistics.counts(),
                "blocks_read": sum(s.blocks_read for s in stores),
                "bytes_read": sum(s.blocks_read * s.block_bytes for s in stores),
                "blocks_kept": max((len(s) for s in stores), default=0),
                "bytes_kept": sum(s.bytes_kept for s in stores),
                "device_bytes_kept": sum(s.device_bytes_kept for s in stores),
                **(asdict(self._tier.counts) if self.tier != "device" else {}),
            }
        )

    def new_layer(self) -> LayerMemory:
        """What is kept for a layer, empty."""
        index = LandmarkIndex(self.index_type, self.candidates) if self.index == "faiss" else None
        return LayerMemory(BlockStore(self.max_blocks, self.scorer == "mean_key", self._tier), index)

    def save(self, folder: Path | str) -> None:
        """Write all that was read to a new folder, from which a memory on any tier, of the same model, can `load` it.

        Raises UserError where the folder exists or the disk is full; then nothing is left behind.
        """
        save(self, Path(folder))

    def load(self, folder: Path | str, device: str | torch.device = "cpu") -> None:
        """Forget everything, and have read what the memory that was saved in a folder had.

        With the tier "disk", and all blocks kept, the folder's files are read where they are, and never written to.
        Raises UserError where something is missing or cut short, where another block size, model or mapping was
        saved, or blocks had been dropped that this memory would keep.
        """
        self.reset()
        load(self, Path(folder), torch.device(device))

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cmt: Tensor | None = None) -> Tensor:
        """Attention of a chunk over itself, the pending tokens before it and the blocks it retrieves.

        q: (B, H, T, d); k, v: (B, H_kv, T, d); cmt: (H_kv, d), the layer's key of the context miss token. None of them
        is rotated: the memory owns positions. The chunk follows what has been committed; a landmark stands wherever
        the stream position says so. Returns (B, H, T, d).
        """
        if layer not in self.layers:
            self.layers[layer] = self.new_layer()
        state = self.layers[layer]
        if state.chunk is not None:
            raise RuntimeError(f"layer {layer} has attended to this chunk already: commit() ends a chunk")
        if state.pending is not None:
            k, v = torch.cat([state.pending[0], k], 2), torch.cat([state.pending[1], v], 2)
        state.chunk = k, v
        self._length = q.shape[2]
        pending = self.position % (self.block_size + 1)
        scale = 1 / math.sqrt(q.shape[-1])
        out, lse = self._attend_locally(q, k, v, pending, scale)
        depths, weight, wanted = self._depths(state.store.added), None, None
        if cmt is not None:
            weight = self._miss_weight(q, cmt, lse, scale, pending + (depths[-1] if depths else 0))
            out = out * (1 - weight)[..., None].to(out.dtype)
        if self.k == 0 or len(state.store) == 0:
            self._observe(layer, state.store, q, weight)
            return out
        self._statistics.searches += 1
        if weight is not None:
            wanted = lookups(weight, self._cutoff(layer), self.granularity)
            self._statistics.drop(layer, wanted.needed)
            if wanted.none:
                self._statistics.searches_skipped += 1
                self._observe(layer, state.store, q, weight)
                return out
        return self._look_up(layer, state, q * scale, out, lse, wanted, pending, depths)

    def _attend_locally(self, q: Tensor, k: Tensor, v: Tensor, pending: int, scale: float) -> tuple[Tensor, Tensor]:
        """Output (B, H, T, d) and log-sum-exp (B, H, T) of queries over their own chunk and the pending tokens."""
        factors = self._rotary(0, k.shape[2], q)
        q, k = rotate(q, factors[pending:]), rotate(k, factors)
        seen = min(pending + 1, self.block_size)
        backend = backend_for(self.backend, q, self.block_size)
        if backend != "triton" and k.shape[2] <= self.block_size + 1 and seen == min(k.shape[2], self.block_size):
            # Generated tokens: all queries see the same normal tokens, those of one block, and no landmark.
            k, v = (x[:, :, :seen].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return attention_forward(q, k, v, scale=scale)
        settings = {"block_size": self.block_size, "prefix": pending, "scale": scale, "backend": backend}
        return landmark_attention(q, k, v, **settings, return_lse=True)

    def _look_up(
        self,
        layer: int,
        state: LayerMemory,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        wanted: Lookups | None,
        pending: int,
        depths: list[int],
    ) -> Tensor:
        """Retrieve blocks, attend to them, and put that together with the output and log-sum-exp of local attention."""
        store, turned = state.store, self._turn(q, pending, depths, wanted)
        near = self.k if self.mapping == "stingy" else 0
        started = time.perf_counter()
        if state.index is not None and layer not in self.tie_layers and len(store) > self.k:
            ages = retrieve_candidates(turned, store, state.index, k=self.k, granularity=self.granularity, near=near)
        else:
            ages = retrieve(
                turned,
                store,
                k=self.k,
                granularity=self.granularity,
                scorer=self.scorer,
                tie=layer in self.tie_layers,
                generator=self._generator(layer, q.device),
                near=near,
            )
        self._statistics.seconds_searching += time.perf_counter() - started
        reading = None if wanted is None else wanted.reading
        sets, chosen, looked_up = ages, ages.numel(), q[..., 0].numel()
        if reading is not None:
            chooses = reading.any(1, keepdim=True) if ages.shape[1] == 1 else reading
            sets = ages * (chooses.any(2, keepdim=True) if ages.shape[2] == 1 else chooses)[..., None]
            chosen, looked_up = int((sets > 0).sum()), int(reading.sum())
        self._statistics.retrievals += chosen // ages.shape[-1]
        self._statistics.blocks_retrieved += chosen
        self._statistics.lookups += looked_up
        lags = attending_lag(ages, self.k, len(turned)) if near else torch.ones_like(ages)
        if backend_for(self.backend, q, self.block_size) == "triton":
            self._observe(layer, store, q, None if wanted is None else wanted.weight, sets, None, wanted)
            if wanted is None:
                return read_blocks_fused(turned, store, ages, lags, local=(out, lse))
            weight = wanted.select(wanted.weight)
            return wanted.add(out, read_blocks_fused(turned, store, ages, lags, weight=weight, needed=reading))
        block_out, gates = read_blocks(turned, store, ages, lags, reading)
        if wanted is None:
            weights = torch.cat([lse[..., None], gates.to(lse.dtype)], -1).softmax(-1).to(q.dtype)
            self._observe(layer, store, q, None, sets, weights[..., 1:])
            return weights[..., :1] * out + torch.einsum("bhtq,bhtqd->bhtd", weights[..., 1:], block_out)
        weights = gates.to(lse.dtype).softmax(-1) * wanted.select(wanted.weight)[..., None]
        if reading is not None:
            weights = weights * reading[..., None]
        self._observe(layer, store, q, wanted.weight, sets, weights, wanted)
        return wanted.add(out, torch.einsum("bhtq,bhtqd->bhtd", weights.to(q.dtype), block_out))

    def _observe(
        self,
        layer: int,
        store: BlockStore,
        q: Tensor,
        missed: Tensor | None,
        ages: Tensor | None = None,
        weights: Tensor | None = None,
        wanted: Lookups | None = None,
    ) -> None:
        """Tell the observer, if there is one, what was looked up; ages None: nothing."""
        if self.observer is None:
            return
        if ages is None:
            weights = q.new_empty(*q.shape[:3], 0)
            ages = weights.long()
        self.observer(Retrieval(layer, self.position, store, ages, weights, missed, wanted))

    def _cutoff(self, layer: int) -> float:
        return self.cutoff[layer] if isinstance(self.cutoff, Sequence) else self.cutoff

    def _depths(self, blocks_fed: int) -> list[int]:
        """How far before the first pending token a query may see blocks stand: for lag 1…S, or once, truly."""
        width = self.block_size + 1
        if self.mapping == "true":
            return [blocks_fed * width] if blocks_fed else []
        return [lag * width for lag in range(1, slots(blocks_fed, self.k) + 1)]

    def _miss_weight(self, q: Tensor, cmt: Tensor, lse: Tensor, scale: float, start: int) -> Tensor:
        """S (B, H, T), the weight of the context miss token, for queries that stand at `start` and after."""
        turned = rotate(q, self._rotary(start, q.shape[2], q))
        return torch.sigmoid(miss_scores(turned, rotate_cmt(cmt, self._rotary), len(cmt)) * scale - lse)

    def _turn(self, q: Tensor, pending: int, depths: list[int], wanted: Lookups | None) -> Tensor:
        """Queries turned for each depth, (S, B, T or n, H, d)."""
        queries = q.shape[2]
        table = self._rotary(0, pending + queries + depths[-1], q)
        if wanted is None or wanted.at is None:
            factors = torch.stack([table[pending + depth :][:queries] for depth in depths])[:, None, :, None]
        else:
            at = wanted.at.transpose(1, 2) + pending
            factors = torch.stack([table[at + depth] for depth in depths])
            q = wanted.select(q)
        return rotate(q.transpose(1, 2), factors)

    def _generator(self, layer: int, device: torch.device) -> torch.Generator:
        seed = hash((self.seed, self.position, layer)) & 0x7FFF_FFFF
        return torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def commit(self) -> None:
        """The chunk is over, in every layer: keep its complete blocks, and the rest as pending. One commit a chunk."""
        width = self.block_size + 1
        for state in self.layers.values():
            if state.chunk is None:
                continue
            k, v = state.chunk
            state.chunk = None
            full = k.shape[2] // width * width
            if full:
                keys = k[:, :, :full].unflatten(2, (-1, width))
                values = v[:, :, :full].unflatten(2, (-1, width))
                start = state.store.added * width if self.mapping == "true" else 0
                length = full if self.mapping == "true" else width
                factors = self._rotary(start, length, keys).unflatten(0, (-1, width))
                state.store.add(rotate(keys, factors), values)
            state.pending = k[:, :, full:].clone(), v[:, :, full:].clone()
        self.position += self._length
        self._statistics.chunks += bool(self._length)
        self._length = 0
