"""Landmark memory: read a text of any length in chunks, and retrieve a few earlier blocks (paper, Section 3.2)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landmark.attention import backend_for, check_kernel, without_kernel
from landmark.attention.context_miss_token import context_miss_scores
from landmark.attention.hierarchy import Hierarchy, first_bias
from landmark.attention.inputs import as_autocast, without_autocast
from landmark.attention.landmark_keys import add_summaries
from landmark.attention.rotary import RotaryTable, RotaryTables, rotate, rotate_cmt
from landmark.attention.sinks import with_sinks
from landmark.memory.block_attention import attend_to_blocks, attend_to_blocks_fused, merge
from landmark.memory.block_store import BlockStore
from landmark.memory.carried import CarriedStates
from landmark.memory.counters import MemoryStatistics, with_rates
from landmark.memory.cutoff import QuerySelection, select_queries
from landmark.memory.hierarchy import Descent, GroupKeys
from landmark.memory.index import LandmarkIndex, import_faiss, retrieve_candidates
from landmark.memory.landmark_values import merge_with_landmarks
from landmark.memory.layer import LayerMemory
from landmark.memory.local_attention import LocalAttention
from landmark.memory.observer import Observer, Retrieval
from landmark.memory.positions import attending_lag, lag_distances, rotate_queries, scoring_lag
from landmark.memory.query_tiles import QueryTiles
from landmark.memory.rerank import rerank, rerank_together
from landmark.memory.retrieval import retrieve, retrieve_given
from landmark.memory.saving import Identity, load, save
from landmark.memory.settings import check_settings
from landmark.memory.tiers import Tier
from landmark.utils.errors import UserError


class Memory:
    """The blocks and pending tokens that a landmark transformer keeps between chunks, for all its layers.

    For each chunk every layer calls `attend`:

    1. Attend locally: to the chunk itself and to the pending tokens before it, which belong to the last, incomplete
       block and to `local_blocks` complete ones before it. This also gives the weight S of a context miss token; a
       query with S below the cutoff stops here.
    2. Retrieve, score: each query against the landmark of every block, both at their stingy positions.
       In a hierarchy of landmarks (hierarchy.py) this is a descent: the k best groups, then the k best blocks in them.
    3. Retrieve, reduce: where queries or heads choose together (granularity, query window), the softmax of each
       one's scores over the landmarks, and the maximum of these probabilities.
    4. Retrieve, choose: the k blocks with the highest scores; the `recent` newest ones are always among them.
    5. Attend to each retrieved block separately.
    6. Merge: a softmax of gates weighs the outputs. The gates are the scores of the retrieved blocks' landmarks (with
       `joint_softmax` plus a part of the log-sum-exp of their tokens' scores) and the log-sum-exp of local attention.
       With a context miss token local attention has the weight 1 − S instead, and the retrieved blocks share S by a
       softmax of their gates alone.

    Then one `commit` stores the complete blocks of all layers, drops the oldest blocks where there are more than
    `max_blocks`, and keeps the other tokens of the chunk as pending tokens.
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
        still_layers: Collection[int] = (),
        key_offset: float = 0.0,
        landmark_key: str = "token",
        seed: int = 0,
        tie_layers: tuple[int, ...] | None = None,
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
        local_blocks: int = 0,
        gradient: bool = False,
        fan_out: int | None = None,
        levels: int = 1,
        softcap: float | None = None,
        uneven: bool = False,
        landmark_values: bool = False,
        rerank: int | None = None,
        recent: int = 0,
        joint_softmax: float = 0.0,
        query_window: int = 1,
    ):
        """Start with nothing read.

        Args:
            block_size: ℓ, normal tokens of a block.
            max_blocks: most blocks kept in each layer; the oldest are dropped first. None: all are kept.
            k: blocks that a query retrieves, or fewer where fewer are kept.
            granularity: "per_token_and_head": each query of each head has its own set of retrieved blocks;
                "per_token_and_group": the heads that share keys share a set; "per_token": all heads share a set;
                "per_head": the queries of a chunk share a set.
            scorer: how blocks are ranked: by "landmark", or for ablations "recent", "random", "mean_key" or "given", by
                which the blocks of the attribute `given` come first: (B, n), their numbers in the text, from 0.
            tier: where blocks are kept: "device", "cpu" or "disk" (tiers.py). Results are the same, bit for bit.
            rope_base: base of the rotary positions; or (d/2,), radians per position of each pair.
            still_layers: layers whose queries and keys are not rotated.
            key_offset: fraction of each head's channels in which a key is that of the normal token before
                (`landmark.attention.key_offset`).
            landmark_key: "token"; "mean": plus the mean of the block's keys; or "pooled": plus the keys weighed by the
                landmark's query, and their entropy in the last channel (`landmark.attention.landmark_keys`).
            seed: of the random numbers of the scorer "random".
            tie_layers: layers in which all landmarks are the same vector, so that all blocks older than the last k have
                the same score; there the newer ones are taken. None: the first layer, or with summaries of
                blocks in their keys no layer.
            cutoff: a query retrieves nothing where the weight of the context miss token is below it, 0…1; one number,
                or one for each layer. Default: every query retrieves.
            mapping: positions of blocks: "stingy" (Section 3.2.1), or "true", for which a model must be trained.
            observer: called with a `Retrieval` whenever a layer attends (observer.py); None: there is none.
            folder: of the files of the tier "disk", which have no name and vanish when the process ends; None: the
                system's folder for temporary files.
            cache: blocks (all heads) fetched from another tier that the device keeps in each layer; the least recently
                used are dropped first.
            model: returns a string that identifies the model. A saved memory is loaded only if this string is the same;
                None: the model has no such string.
            backend: as in `landmark.attention`. With "triton", or "auto" on a GPU, one kernel does steps 5 and 6.
            index: "exact": all landmarks are scored; "faiss": of the older ones only `candidates` (index.py).
            index_type: "ivf", an inverted file, approximate, or "flat". Used with index="faiss" only.
            candidates: landmarks that the index finds for each query. Used with index="faiss" only.
            local_blocks: blocks before a query's own that it always sees, without their landmarks. They stay pending,
                and are retrieved only when they are further away.
            gradient: whether `attend` has a gradient, of the chunk's queries, keys and values; what is committed has
                none. For training; with "per_token_and_head" or "per_token", and without a context miss token.
            fan_out: m, nodes of a group in a hierarchy of landmarks (`landmark.attention.hierarchy`). A memory with
                groups keeps all blocks, and neither granularity, scorer nor index can be chosen. None: no groups.
            levels: of groups.
            softcap: cap of all scores (`landmark.attention`); neither with fan_out, index="faiss" nor a context miss
                token. None: there is none.
            uneven: whether blocks may end early, with empty places before their landmark, which `attend` is told. For
                one text, in "device", without an index, groups, local blocks, pooled keys and a context miss token.
            landmark_values: whether the blocks that are not retrieved are read by the values of their landmarks
                (landmark_values.py); without an index, groups, and a context miss token.
            rerank: blocks with the best landmarks, of which the k with the best landmark and tokens are retrieved
                (rerank.py); with "per_token_and_head" and the scorer "landmark". None: the k with the best landmarks.
            recent: newest blocks that are always among the k; with the scorer "landmark", without an index and groups.
            joint_softmax: how much of a block's log-sum-exp is added to its landmark's score, as in
                `landmark.attention.landmark_attention`; without groups, landmark_values and a context miss token.
            query_window: queries, of a token and of the places before it, landmarks included, for the best of which
                blocks are chosen (query_window.py); at most ℓ, with the scorer "landmark" or "mean_key", without an
                index, groups, uneven blocks and a context miss token. 1: each query chooses alone.

        Raises UserError for a setting out of range, and for index="faiss" where faiss is not installed.
        """
        check_settings(
            block_size=block_size,
            k=k,
            max_blocks=max_blocks,
            granularity=granularity,
            scorer=scorer,
            tier=tier,
            cutoff=cutoff,
            mapping=mapping,
            key_offset=key_offset,
            landmark_key=landmark_key,
            cache=cache,
            index=index,
            index_type=index_type,
            candidates=candidates,
            local_blocks=local_blocks,
            fan_out=fan_out,
            levels=levels,
            softcap=softcap,
            uneven=uneven,
            landmark_values=landmark_values,
            rerank=rerank,
            recent=recent,
            joint_softmax=joint_softmax,
            query_window=query_window,
        )
        if index == "faiss":
            import_faiss()
        self.block_size, self.max_blocks, self.k = block_size, max_blocks, k
        self.granularity, self.scorer, self.tier = granularity, scorer, tier
        self.cutoff, self.mapping = cutoff, mapping
        self.seed, self.observer, self.model, self.backend = seed, observer, model, backend
        self.folder, self.cache = None if folder is None else Path(folder), cache
        self.index, self.index_type, self.candidates = index, index_type, candidates
        self.key_offset, self.landmark_key, self.local_blocks = key_offset, landmark_key, local_blocks
        self.fan_out, self.levels = fan_out, levels
        self.gradient, self.softcap, self.uneven = gradient, softcap, uneven
        self.rerank, self.recent, self.query_window = rerank, recent, query_window
        self.landmark_values, self.joint_softmax = landmark_values, float(joint_softmax)
        if tie_layers is None:
            tie_layers = (0,) if landmark_key == "token" else ()
        self.tie_layers = tie_layers if mapping == "stingy" else ()
        self.rope_base = rope_base.tolist() if isinstance(rope_base, Tensor) else rope_base
        self._local = LocalAttention(block_size, key_offset, landmark_key, local_blocks, softcap, self.joint_softmax)
        self.given: Tensor | None = None
        self.still_layers, self._rotary_of = frozenset(still_layers), RotaryTables(rope_base, still_layers)
        self.reset()

    def reset(self) -> None:
        """Forget everything, statistics included: a new text begins."""
        self.position = 0  # stream positions committed, landmarks included
        self._length = 0  # tokens of the current chunk, landmarks included
        self._expected = 0  # blocks of the text, as far as it is known
        self._torn = False  # whether a commit ended midway: some layers then have the chunk, and others do not
        self.layers: dict[int, LayerMemory] = {}
        self.carried = CarriedStates()
        self._statistics = MemoryStatistics()
        self._tier = Tier(self.tier, self.folder, self.cache)

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the last reset, and current sizes; see `landmark.memory.counters.MemoryStatistics`."""
        stores = [layer.store for layer in self.layers.values()]
        of_groups = sum(0 if layer.groups is None else layer.groups.nbytes for layer in self.layers.values())
        return with_rates(
            {
                **self._statistics.counts(),
                "blocks_read": sum(s.blocks_read for s in stores),
                "bytes_read": sum(s.blocks_read * s.block_bytes for s in stores),
                "blocks_kept": max((len(s) for s in stores), default=0),
                "bytes_kept": sum(s.bytes_kept for s in stores) + of_groups,
                "device_bytes_kept": sum(s.device_bytes_kept for s in stores) + of_groups,
                **(asdict(self._tier.counts) if self.tier != "device" else {}),
                **(self._tokens_in_blocks() if self.uneven else {}),
            }
        )

    def _tokens_in_blocks(self) -> dict[str, int]:
        store = next((layer.store for layer in self.layers.values()), None)
        count = 0 if store is None else len(store)
        sizes = None if store is None else store.sizes
        return {"uneven_blocks": count, "uneven_block_tokens": 0 if sizes is None else int(sizes[:count].sum())}

    def new_layer(self) -> LayerMemory:
        """An empty layer with the memory's settings."""
        index = LandmarkIndex(self.index_type, self.candidates) if self.index == "faiss" else None
        groups = None if self.fan_out is None else GroupKeys(self.fan_out, self.levels)
        store = BlockStore(self.max_blocks, self.scorer == "mean_key", self._tier, self.landmark_values)
        return LayerMemory(store, index, groups)

    def expect(self, blocks: int) -> None:
        """Reserve room at once, and no more than needed, for a text of so many complete blocks, past ones included."""
        self._expected = blocks

    def save(self, folder: Path | str) -> None:
        """Write everything to a new folder. A memory of the same model, on any tier, can `load` it.

        Raises UserError, and leaves nothing behind, where the folder exists or the disk is full; RuntimeError where a
        commit failed.
        """
        self._check_whole()
        save(Path(folder), self._identity(), self.position, self.layers, self.carried)

    def load(self, folder: Path | str, device: str | torch.device = "cpu") -> None:
        """Replace the content by that of a saved memory. device: of the loaded tensors.

        With the tier "disk" and without `max_blocks`, the folder's files are read in place, and never written to.
        Raises UserError for a file that is missing or cut short, and for a saved memory with another block size, model
        or mapping, or that had dropped blocks which this memory would keep; then the content stays as it was.
        """
        before = self.__dict__.copy()
        self.reset()
        try:
            self.position, self.layers, self.carried = load(
                Path(folder), self._identity(), self.max_blocks, self.new_layer, torch.device(device)
            )
        except BaseException:
            self.__dict__.update(before)
            raise

    def _identity(self) -> Identity:
        model = None if self.model is None else self.model()
        keys = (
            self.key_offset,
            self.landmark_key,
            self.local_blocks,
            self.uneven,
            self.landmark_values,
            self.joint_softmax,
        )
        return Identity(self.block_size, self.rope_base, self.mapping, *keys, model)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cmt: Tensor | None = None,
        sinks: Tensor | None = None,
        group_bias: Tensor | None = None,
        empty: Tensor | None = None,
    ) -> Tensor:
        """Attention of a chunk to itself, to the pending tokens before it and to the blocks that it retrieves.

        The chunk continues the committed text, and includes the landmarks that belong between its tokens.

        Args:
            layer: number of the layer.
            q: (B, H, T, d), not rotated: the memory assigns positions. Under autocast all is computed in its type.
            k, v: (B, H_kv, T, d), not rotated.
            cmt: (H_kv, d), the layer's key of the context miss token, not rotated; None: the model has no such token.
            sinks: (H,), the layer's learned scores of a place without a value; None: the model has none.
            group_bias: (levels, H_kv), the layer's, added to the scores of groups of landmarks; None: log m.
            empty: (1, T), bool, places of the chunk without a token, required exactly where the memory is uneven. Their
                outputs have no meaning.

        Returns (B, H, T, d). Raises RuntimeError where the last chunk is not committed, or its commit failed;
        ValueError for a batch or a context miss token where the memory is uneven.
        """
        if self.uneven != (empty is not None) or (self.uneven and (len(q) > 1 or cmt is not None)):
            raise ValueError("empty: is for one text, in a memory with uneven=True, without a context miss token")
        q, k, v = as_autocast(q, k, v)
        with torch.set_grad_enabled(self.gradient and torch.is_grad_enabled()), without_autocast(q):
            return self._attend(layer, q, k, v, cmt, sinks, group_bias, empty)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cmt: Tensor | None,
        sinks: Tensor | None,
        group_bias: Tensor | None,
        empty: Tensor | None,
    ) -> Tensor:
        self._check_whole()
        if layer not in self.layers:
            self.layers[layer] = self.new_layer()
        state = self.layers[layer]
        if state.chunk is not None:
            raise RuntimeError(
                f"layer {layer} has attended to this chunk already: call commit() before the next chunk, or discard() "
                "after an error"
            )
        pending = state.num_pending
        k, v = state.append(self._local.offset(state, k, pending, empty), v, empty)
        self._length = q.shape[2]
        scale = 1 / math.sqrt(q.shape[-1])
        rotary = self._rotary_of(layer)
        distances = lag_distances(state.store.added, self.k, self.block_size + 1, self.mapping)

        asked = q if self.query_window == 1 else state.ask(q, self.query_window)
        before = asked.shape[2] - q.shape[2]  # queries of tokens before the chunk

        def rotated_queries(selection: QuerySelection | None) -> Tensor:
            # Scores are float32 also in half precision, where rounding them would change which blocks are the best.
            exact = asked.to(torch.promote_types(q.dtype, torch.float32)) * scale
            return rotate_queries(exact, rotary, pending - before, distances, selection)

        descent = rotated = None
        if state.groups is not None:
            descent = self._descent(layer, state.store, state.groups, group_bias, q)
            if len(state.store):
                rotated = rotated_queries(None)
                descent.score_open(rotated)
        out, lse = self._local.attend(
            state, rotary, q, k, v, pending, descent, self._backend(q, local_blocks=self.local_blocks)
        )
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        cmt_weight = selection = None
        if cmt is not None:
            if self.softcap is not None or self.landmark_values or self.joint_softmax or self.query_window > 1:
                raise ValueError(
                    "softcap, landmark_values, joint_softmax, query_window: leave out the context miss token"
                )
            start = pending + (distances[-1] if distances else 0)
            cmt_weight = self._cmt_weight(q, cmt, lse, rotary, scale, start)
            out = out * (1 - cmt_weight)[..., None].to(out.dtype)
        if self.k == 0 or len(state.store) == 0:
            return self._without_blocks(layer, out, cmt_weight)
        self._statistics.searches += 1
        if cmt_weight is not None:
            selection = select_queries(cmt_weight, self._cutoff(layer), self.granularity, k.shape[1])
            self._statistics.count_dropped(layer, selection.retrieves)
            if selection.is_empty:
                self._statistics.searches_skipped += 1
                return self._without_blocks(layer, out, cmt_weight)
        if rotated is None or (selection is not None and selection.indices is not None):
            rotated = rotated_queries(selection)
        started = time.perf_counter()
        if descent is None:
            ages, shift = self._retrieve(layer, state, rotated.detach(), before), None
        else:
            ages, shift = descent.retrieve(rotated, self._proposed, selection)
        rotated = rotated.to(q.dtype)
        if ages.shape[-1] > self.k:
            lags = scoring_lag(ages, self._num_recent, len(rotated))
            selected = None if selection is None else selection.selected
            proposed = QueryTiles(rotated, state.store, ages, lags, selected, self.softcap)
            if self.query_window > 1:
                of_window = {"window": self.query_window, "before": before, "kept": self.recent}
                ages = rerank_together(proposed, ages, self.k, **of_window)
            else:
                best = rerank(proposed, self.k, shift, ages <= self.recent if self.recent else None)
                ages, shift = ages.gather(-1, best), None if shift is None else shift.gather(-1, best)
        rotated = rotated[:, :, before:]
        self._statistics.seconds_searching += time.perf_counter() - started
        out, weights = self._attend_and_merge(state.store, rotated, ages, (out, lse), selection, shift)
        if selection is not None:
            ages = selection.mask_ages(ages)
        self._statistics.count_retrieved(ages, q[..., 0].numel(), selection)
        if self.observer is not None:
            self.observer(Retrieval(layer, self.position, state.store, ages, weights, cmt_weight, selection))
        return out

    def _descent(self, layer: int, store: BlockStore, groups: GroupKeys, bias: Tensor | None, q: Tensor) -> Descent:
        bias = first_bias(groups.fan_out, self.levels, 1) if bias is None else bias
        bias = bias.to(q.device, torch.promote_types(q.dtype, torch.float32))
        hierarchy = Hierarchy(groups.fan_out, bias).for_heads(q.shape[1])
        return Descent(store, groups, hierarchy, self._num_recent, layer in self.tie_layers)

    def _cmt_weight(self, q: Tensor, cmt: Tensor, lse: Tensor, rotary: RotaryTable, scale: float, start: int) -> Tensor:
        """The weight S of the context miss token, (B, H, T), for queries at the positions from `start` on."""
        rotated = rotate(q, rotary(start, q.shape[2], q))
        return torch.sigmoid(context_miss_scores(rotated, rotate_cmt(cmt, rotary), len(cmt)) * scale - lse)

    def _cutoff(self, layer: int) -> float:
        return self.cutoff[layer] if isinstance(self.cutoff, Sequence) else self.cutoff

    def _without_blocks(self, layer: int, out: Tensor, cmt_weight: Tensor | None) -> Tensor:
        """Return the local output; the observer is told that no block is retrieved."""
        if self.observer is not None:
            weights = out.new_empty(*out.shape[:3], 0)
            store = self.layers[layer].store
            self.observer(Retrieval(layer, self.position, store, weights.long(), weights, cmt_weight))
        return out

    def _retrieve(self, layer: int, state: LayerMemory, rotated_queries: Tensor, before: int = 0) -> Tensor:
        """Ages (B, H, H_kv or 1, T or 1, q) of the retrieved blocks, oldest first; 1 is the newest block.

        before: queries at the start that are of tokens before the chunk; where more than k blocks are retrieved, for a
        second look, they have their own.
        """
        common = {"k": self._proposed, "granularity": self.granularity, "num_recent": self._num_recent}
        is_tied = layer in self.tie_layers
        if state.index is not None and not is_tied and len(state.store) > self._proposed:
            return retrieve_candidates(rotated_queries, state.store, state.index, **common)
        if self.scorer == "given":
            if self.given is None:
                raise RuntimeError("scorer='given': set the memory's `given` to the numbers of the blocks first")
            ages = state.store.added - self.given
            return retrieve_given(state.store, ages, rotated_queries, self.k, self.granularity)
        generator = self._generator(layer, rotated_queries.device)
        of_scores = {"scorer": self.scorer, "tie": is_tied, "generator": generator, "softcap": self.softcap}
        of_scores |= {"kept": self.recent}
        if min(self._proposed, len(state.store)) <= self.k:
            of_scores |= {"window": self.query_window, "before": before}
        # Queries are float32 here, also where blocks are in half precision, in which larger blocks fit into a GPU.
        fused = self._backend(rotated_queries[:0].to(state.store.dtype)) == "triton"
        return retrieve(rotated_queries, state.store, **of_scores, **common, fused=fused)

    def _backend(self, like: Tensor, **options: object) -> str:
        """The backend for tensors like this, with the memory's options and others of `landmark_attention`."""
        of_memory = {"hierarchy": self.fan_out, "softcap": self.softcap}
        lacking = without_kernel(**of_memory, landmark_values=self.landmark_values, **options)
        check_kernel(self.backend, lacking)
        return backend_for(self.backend, like, self.block_size, not lacking)

    @property
    def _proposed(self) -> int:
        """Blocks that landmarks propose, of which k are retrieved."""
        return self.rerank or self.k

    @property
    def _num_recent(self) -> int:
        """How many of the newest blocks have their own lag; with true positions all blocks share one."""
        return self.k if self.mapping == "stingy" else 0

    def _lags(self, ages: Tensor, slots: int) -> Tensor:
        """The lag at which each retrieved block is attended to, of the shape of its age."""
        return attending_lag(ages, self.k, slots) if self.mapping == "stingy" else torch.ones_like(ages)

    def _generator(self, layer: int, device: torch.device) -> torch.Generator:
        seed = hash((self.seed, self.position, layer)) & 0x7FFF_FFFF
        return torch.Generator(device).manual_seed(seed)

    def _attend_and_merge(
        self,
        store: BlockStore,
        rotated_queries: Tensor,
        ages: Tensor,
        local: tuple[Tensor, Tensor],
        selection: QuerySelection | None,
        shift: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, T, d) and the weights of the blocks (B, H, T or n, q), which are None with the fused kernel.

        local: output and log-sum-exp of local attention. shift: what is added to the gates (B, H, n, q).
        """
        if self._backend(rotated_queries) == "triton" and not rotated_queries.requires_grad:
            of_kernel = self._num_recent, local, selection, self.joint_softmax
            return attend_to_blocks_fused(rotated_queries, store, ages, *of_kernel), None
        lags = self._lags(ages, len(rotated_queries))
        selected = None if selection is None else selection.selected
        block_out, gates = attend_to_blocks(
            rotated_queries, store, ages, lags, selected, self.softcap, self.joint_softmax
        )
        gates = gates if shift is None else gates + shift
        if self.landmark_values:
            return merge_with_landmarks(
                local, block_out, gates, rotated_queries, store, ages, self._num_recent, self.softcap
            )
        return merge(local, block_out, gates, selection)

    @torch.no_grad()
    def commit(self) -> None:
        """End the chunk in every layer: store its complete blocks, and keep the other tokens as pending.

        Raises UserError where the disk is full. Layers then differ, and the memory refuses to go on until it is loaded
        again or `reset`.
        """
        self._check_whole()
        try:
            for layer, state in self.layers.items():
                if state.chunk is not None:
                    self._store_blocks(state, self._rotary_of(layer), *state.chunk)
                    state.end_chunk()
        except BaseException:
            self._torn = True
            raise
        self.carried.commit()
        self.position += self._length
        self._statistics.chunks += bool(self._length)
        self._length = 0

    def discard(self) -> None:
        """Forget a chunk that is not committed: where a layer failed, no layer has read it.

        Raises RuntimeError with key_offset, where the last key of the chunk before is overwritten already.
        """
        if self.key_offset:
            raise RuntimeError("with key_offset a chunk cannot be discarded: load the memory again")
        for state in self.layers.values():
            known = state.num_pending // (self.block_size + 1)
            state.weights = state.weights[:, :, :known] if known and state.weights is not None else None
            state.chunk = state.next_queries = None
        self.carried.discard()
        self._length = 0

    def select(self, samples: Tensor) -> Memory:
        """A copy whose samples are these of the batch, as beam search needs it. Its statistics begin anew.

        samples: (n,), integer; a sample may occur more than once. Raises UserError for index="faiss",
        RuntimeError where a chunk is not committed, or its commit failed.
        """
        self._check_whole()
        if self.index == "faiss" and self.layers:
            raise UserError("memory.index=faiss: its samples cannot be reordered; use memory.index=exact")
        if self._length:
            raise RuntimeError("a chunk is not committed yet: call commit() before select()")
        chosen = copy.copy(self)
        chosen.reset()
        chosen.position, chosen.carried = self.position, self.carried.select(samples)
        for layer, state in self.layers.items():
            chosen.layers[layer] = copied = chosen.new_layer()
            state.store.select(samples, copied.store)
            copied.pending, copied.last_key, copied.weights = state.pending, state.last_key, state.weights
            if state.pending is not None:
                keys, values = (x.index_select(0, samples.to(x.device)) for x in state.pending)
                copied.pending = keys, values
            if state.queries is not None:
                copied.queries = state.queries.index_select(0, samples.to(state.queries.device))
            if state.last_key is not None:
                copied.last_key = state.last_key.index_select(0, samples.to(state.last_key.device))
            if state.weights is not None:
                copied.weights = state.weights.index_select(0, samples.to(state.weights.device))
        return chosen

    def _check_whole(self) -> None:
        if self._torn:
            raise RuntimeError("a commit failed and layers differ: load the memory again, or reset() it")

    def _store_blocks(self, state: LayerMemory, rotary: RotaryTable, k: Tensor, v: Tensor) -> None:
        width = self.block_size + 1
        count = max(0, k.shape[2] // width - self.local_blocks)
        full, weights = count * width, state.weights
        if full:
            keys = k[:, :, :full].unflatten(2, (-1, width))
            values = v[:, :, :full].unflatten(2, (-1, width))
            start = state.store.added * width if self.mapping == "true" else 0
            length = full if self.mapping == "true" else width
            factors = rotary(start, length, keys).unflatten(0, (-1, width))
            keys = rotate(keys.to(torch.promote_types(keys.dtype, torch.float32)), factors)
            state.store.reserve(min(self._expected, self.max_blocks or self._expected), values[..., 1:, :])
            weights = None if weights is None else weights[:, :, :count]
            sizes = self._local.sizes(state, count)
            if self.landmark_key != "token":
                keys = add_summaries(keys, weights, sizes, 1 - self.joint_softmax)
            state.store.add(keys, values, sizes)
        kept = k.shape[2] // width - count
        state.weights = state.weights[:, :, count:].clone() if kept and state.weights is not None else None
        if full:
            k, v = k[:, :, full:].clone(), v[:, :, full:].clone()
        state.pending = k.detach(), v.detach()
