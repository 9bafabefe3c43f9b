"""Landmark memory: read a text of any length in chunks, and retrieve a few earlier blocks (paper, Section 3.2)."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landmark.attention import ContextMiss, Extra, Grouped, Scoring, Sinks, backend_for, has_kernel
from landmark.attention.keys import Keys
from landmark.attention.layout import as_autocast, without_autocast
from landmark.attention.rotary import rotate, rotate_cmt
from landmark.memory.landmarks.block_store import BlockStore
from landmark.memory.landmarks.layer import LayerMemory, Positions, Question, Stingy, TruePositions
from landmark.memory.landmarks.reading import attend_locally, merge, read_and_merge_fused, read_blocks
from landmark.memory.landmarks.select import Best, Faiss, Given, MeanKeys, Newest, Random, SecondLook, Selector
from landmark.memory.landmarks.settings import MemorySettings
from landmark.memory.retrievals import MemoryStatistics, Observer, Retrieval, masked_ages, with_rates
from landmark.memory.saving import K, Place, load, save
from landmark.memory.text_memory import Piece, equal_pieces
from landmark.memory.tiers import Store, TierCounts
from landmark.utils.errors import UserError


class Memory:
    """The blocks and pending tokens that a landmark transformer keeps between chunks, for all its layers.

    For each chunk every layer calls `attend`:

    1. Attend locally: to the chunk itself and to the pending tokens before it, which belong to the last, incomplete
       block. This also gives the weight S of a context miss token.
    2. Choose blocks for each query: the k with the best landmarks, or what another selector does (select/).
    3. Read: attend to each chosen block separately.
    4. Merge: a softmax of gates weighs the outputs. The gates are the scores of the chosen blocks' landmarks (with α
       plus a part of the log-sum-exp of their tokens' scores) and the log-sum-exp of local attention. With a context
       miss token local attention has the weight 1 − S instead, and the chosen blocks share S by a softmax of their
       gates alone.

    Then one `commit` stores the complete blocks of all layers, drops the oldest blocks where there are too many, and
    keeps the other tokens of the chunk as pending tokens.

    cutoff: 0…1, weight of the context miss token below which a query retrieves nothing. model: returns a string that
    identifies the model; a saved memory is loaded only if it is the same. Both may be set.
    """

    cutoff: float = 0.0
    is_rotated = False  # it assigns positions
    ends: tuple[int, ...] = ()  # no text follows another that was read alone
    window = 0  # a query reads no more tokens than those of its block without choosing

    def __init__(
        self,
        block_size: int,
        k: int = 4,
        *,
        select: Selector = Best(),  # noqa: B008 (these are frozen)
        keys: Keys | None = None,
        positions: Positions = Stingy(),  # noqa: B008
        store: Store = Store(),  # noqa: B008
        gate: Grouped = Grouped(),  # noqa: B008
        scoring: Scoring = Scoring(),  # noqa: B008
        backend: str = "auto",
        observer: Observer | None = None,
    ):
        """Start with nothing read. Raises UserError for a number out of range.

        k: blocks that a query retrieves, or fewer where there are fewer; `select` chooses them. keys: None: with rotary
        positions, as in the paper. positions: `Stingy()` or `TruePositions()`. store: where blocks are, and how many;
        results are the same, bit for bit. backend: as in `landmark.attention`; with "triton", or "auto" on a GPU, one
        kernel does steps 3 and 4. observer: called with a `Retrieval` whenever a layer attends.
        """
        if block_size < 1 or k < 0 or (store.max_blocks is not None and store.max_blocks < max(k, 1)):
            raise UserError(
                f"block_size={block_size}, k={k}, max_blocks={store.max_blocks}: must be at least 1, 0 and k (or 1)"
            )
        self.block_size, self.k, self.select, self.keys = block_size, k, select, keys or Keys()
        self.positions, self.store, self.gate, self.scoring = positions, store, gate, scoring
        self.backend, self.observer = backend, observer
        self.model: Callable[[], str | None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything, statistics included: a new text begins."""
        self.position = 0  # stream positions committed, landmarks included
        self._length = 0  # tokens of the current chunk, landmarks included
        self._expected = 0  # blocks of the text, as far as it is known
        self._torn = False  # whether a commit ended midway: some layers then have the chunk, and others do not
        self.layers: dict[int, LayerMemory] = {}
        self._statistics = MemoryStatistics()
        self._before: MemoryStatistics | None = None  # counts before the current chunk
        self._fetched = TierCounts()

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the last reset (`landmark.memory.retrievals.MemoryStatistics`; with a slower tier `TierCounts`),
        blocks_kept of a layer, bytes_kept of all."""
        stores = [layer.store for layer in self.layers.values()]
        return with_rates(
            {
                **self._statistics.counts(),
                "blocks_kept": max((len(s) for s in stores), default=0),
                "bytes_kept": sum(s.bytes_kept for s in stores),
                **(asdict(self._fetched) if self.store.tier != "device" else {}),
            }
        )

    @property
    def width(self) -> int:
        """W, positions of a block in the text: ℓ+1, its landmark included."""
        return self.block_size + 1

    @property
    def landmark_at(self) -> int:
        """Tokens that are to come before the next landmark."""
        return self.block_size - self.position % self.width

    @property
    def tokens_read(self) -> int:
        """Tokens of the text that are committed, without landmarks."""
        return self.position - self.position // self.width

    def new_layer(self) -> LayerMemory:
        return LayerMemory(BlockStore(self.store, self.select.summaries, self._fetched))

    @property
    def visible_from(self) -> int:
        """The first position that the next query sees without choosing its block."""
        return self.position - max((layer.num_pending for layer in self.layers.values()), default=0)

    @property
    def batch_size(self) -> int:
        """Samples of the batch that was read; 0 before."""
        return max((len(layer.pending[0]) for layer in self.layers.values() if layer.pending is not None), default=0)

    def expect(self, tokens: int) -> None:
        """Make room for so many tokens more, without landmarks, when the next blocks are stored."""
        self._expected = max(self._expected, (self.tokens_read + tokens) // self.block_size)

    def pieces(self, length: int, kept: int, most: Callable[[], int], device: str) -> Iterator[Piece]:
        """As of `TextMemory`: `equal_pieces`."""
        return equal_pieces(length, most)

    def begin(self, prefill: bool) -> None:
        """Nothing: all tokens choose alike."""

    def attend_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """`attend` in a layer whose scale may differ. scoring: of the layer."""
        rescale = scoring.scale_of(q.shape[-1]) * math.sqrt(q.shape[-1])
        return self.attend(layer, q if rescale == 1 else q * rescale, k, v, sinks)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, extra: Extra | None = None) -> Tensor:
        """Attention (B, H, T, d) of a chunk to itself, to the pending tokens before it and to the blocks it retrieves.

        The chunk continues the committed text, and includes the landmarks that belong between its tokens. q: (B, H, T,
        d), k, v: (B, H_kv, T, d), not rotated: the memory assigns positions. Under autocast all is computed in its
        type. extra: the layer's context miss token, with a key that is not rotated, or its sinks. Raises RuntimeError
        where the last chunk is not committed, or its commit failed.
        """
        q, k, v = as_autocast(q, k, v)
        with torch.no_grad(), without_autocast(q):
            question, k, v = self._begin(layer, q, k, v)
            question, local = self._attend_locally(question, k, v, extra)  # 1
            ages = self._choose(question)  # 2
            if ages is None:
                return self._done(question, local[0])
            if question.backend == "triton":
                return self._done(question, read_and_merge_fused(question, ages, local), ages)  # 3 and 4
            blocks = read_blocks(question, ages)  # 3
            out, weights = merge(question, local, blocks)  # 4
            return self._done(question, out, ages, weights)

    def _begin(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Question, Tensor, Tensor]:
        """The question of a chunk, and the keys and values (B, H_kv, pending + T, d) that it sees without asking."""
        self._check_whole()
        if layer not in self.layers:
            self.layers[layer] = self.new_layer()
        state = self.layers[layer]
        if state.chunk is not None:
            raise RuntimeError(
                f"layer {layer} has attended to this chunk already: call commit() before the next chunk, or discard() "
                "after an error"
            )
        if state.pending is not None and state.pending[0].dtype != k.dtype:
            raise UserError(
                f"the memory has keys of {state.pending[0].dtype}, this chunk of {k.dtype}: read all of a text under "
                "the same autocast and with weights of one type, or reset() the memory"
            )
        kept = k if state.pending is None else state.pending[0]
        if (kept.shape[:2], kept.shape[3]) != (k.shape[:2], k.shape[3]):
            raise UserError(f"the memory has keys like {tuple(kept.shape)}, this chunk {tuple(k.shape)}: reset() it")
        if self._before is None:
            self._before = copy.deepcopy(self._statistics)
        self._length = q.shape[2]
        backend = backend_for(self.backend, q, self.block_size, has_kernel(self.gate, self.scoring))
        lags = self.positions.lags(state.store.added, self.k, self.width)
        queries = q, state.num_pending, self.keys.rotary(layer), lags
        scoring = self.gate, self.scoring.scale_of(q.shape[-1]), self.scoring.softcap
        k, v = state.begin_chunk(k, v, self.keys, self.width)
        return Question(layer, self.position, state, self.block_size, *queries, *scoring, backend), k, v

    def _attend_locally(
        self, question: Question, k: Tensor, v: Tensor, extra: Extra | None
    ) -> tuple[Question, tuple[Tensor, Tensor]]:
        """Output and log-sum-exp of local attention; a context miss token selects the queries that ask further."""
        out, lse = attend_locally(question, k, v, self.keys)
        if isinstance(extra, Sinks):
            out, lse = extra.merge(out, lse)
        if isinstance(extra, ContextMiss):
            q, distances = question.q, question.lags.distances
            start = question.start + (distances[-1] if distances else 0)
            rotated = rotate(q, question.rotary(start, q.shape[2], q))
            at_its_place = ContextMiss(rotate_cmt(extra.key, question.rotary))
            weight = torch.sigmoid(at_its_place.scores_of(rotated, self.scoring) - lse)
            has_blocks = self.k and len(question.store)
            retrieves = weight >= self.cutoff if self.cutoff and has_blocks else None
            question = replace(question, cmt_weight=weight, retrieves=retrieves)
            out = out * (1 - weight)[..., None].to(out.dtype)
        return question, (out, lse)

    def _choose(self, question: Question) -> Tensor | None:
        """The ages of the blocks that the queries read; None: nothing."""
        if self.k == 0 or len(question.store) == 0:
            return None
        started, ages = time.perf_counter(), None
        if question.retrieves is None or bool(question.retrieves.any()):
            ages = self.select.choose(question, self.k)
        self._statistics.count_search(question, None if ages is None else time.perf_counter() - started)
        return ages

    def _done(
        self, question: Question, out: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """The output, after what was retrieved is counted and the observer is told."""
        retrieves = question.retrieves
        if chosen is None:
            ages, weights = (out.new_empty(*out.shape[:3], 0, dtype=each) for each in (torch.int64, out.dtype))
        else:
            ages = chosen if retrieves is None else masked_ages(chosen, retrieves)
            self._statistics.count_retrieved(ages, out[..., 0].numel(), retrieves)
        if self.observer is not None:
            per_query = ages, weights, question.cmt_weight, retrieves
            self.observer(Retrieval(question.layer, self.position, question.store, *per_query))
        return out

    @torch.no_grad()
    def commit(self) -> None:
        """End the chunk in every layer: store its complete blocks, and keep the other tokens as pending.

        UserError: the disk is full. Layers then differ, and the memory refuses to go on until it is loaded or `reset`.
        """
        self._check_whole()
        try:
            for layer, state in self.layers.items():
                if state.chunk is not None:
                    state.end_chunk(self._store_blocks(layer, state))
        except BaseException:
            self._torn = True
            raise
        self.position += self._length
        self._statistics.chunks += bool(self._length)
        self._length, self._before = 0, None

    def take(self, chunks: Mapping[int, dict[str, Tensor]], tokens: int, queries: int) -> None:
        """Commit a chunk that something else has attended to, with the kernels and without a context miss token.

        chunks: by layer, as `LayerMemory.chunk`. tokens: of the chunk, landmarks included. queries: B·H·T.
        """
        for layer, chunk in chunks.items():
            state = self.layers[layer]
            state.chunk, blocks = chunk, min(self.k, len(state.store))
            if blocks:
                self._statistics.searches += 1
                self._statistics.count_sets(queries, blocks, queries)
        self._length = tokens
        self.commit()

    def _store_blocks(self, layer: int, state: LayerMemory) -> int:
        """Store the complete blocks of a chunk and the pending tokens before it; returns their tokens."""
        assert state.chunk is not None
        k, v = state.chunk["pending_keys"], state.chunk["pending_values"]
        width, count = self.width, k.shape[2] // self.width
        if count:
            keys, values = (x[:, :, : count * width].unflatten(2, (count, width)) for x in (k, v))
            factors = self.positions.stored(self.keys.rotary(layer), state.store.added, (count, width), keys)
            keys = rotate(keys.to(torch.promote_types(keys.dtype, torch.float32)), factors)
            keys = self.keys.with_means(keys, self.gate.landmark_share)
            state.store.reserve(self._expected, values[..., 1:, :])
            state.store.add(keys, values)
        return count * width

    def discard(self) -> None:
        """Forget a chunk that is not committed, its counts included: where a layer failed, no layer has read it."""
        for state in self.layers.values():
            state.chunk = None
        if self._before is not None:
            self._statistics = self._before
        self._length, self._before = 0, None

    def select_samples(self, samples: Tensor) -> "Memory":
        """A copy whose samples (n,) are these of the batch, as beam search needs it. Its statistics begin anew.

        Raises RuntimeError where a chunk is not committed.
        """
        self._check_whole()
        if self._length:
            raise RuntimeError("a chunk is not committed yet: call commit() before select_samples()")
        return self._copy(samples, self.position, self.mark())

    @property
    def settled(self) -> int:
        """All positions: a chunk's queries see nothing of a later one."""
        return self.position

    def settle(self, at: int | None = None) -> None:
        """Nothing: see `settled`."""

    def is_end(self, tokens: int, local: int) -> bool:
        """Whether another text may go on here: behind a whole chunk, so that its chunks are those of a new text."""
        return tokens == local

    def fork_point(self, tokens: int) -> int:
        """0: a copy begins at a mark."""
        return 0

    def takes_guesses(self, tokens: int, device: str) -> bool:
        """No: blocks that are stored are not taken back."""
        return False

    def forget(self, tokens: int) -> None:
        """Raises RuntimeError: see `takes_guesses`."""
        raise RuntimeError("the tokens of a text with landmarks are not taken back")

    def token_kernels(self, device: torch.device, layers: int) -> None:
        """None: a `Step` reads a token of our decoder."""

    def append(self, other: "Memory", settled: int | None = None) -> None:
        """Raises UserError: blocks have their positions from the text before them."""
        raise UserError("several memories: only texts that are read without landmarks can be asked together")

    def observe(self, local: int) -> int:
        """Let observers have weights, which Triton's kernels do not give."""
        self.backend = "blockwise"
        return local

    @property
    def has_dropped(self) -> bool:
        """Whether the oldest blocks were dropped."""
        return any(len(layer.store) < layer.store.added for layer in self.layers.values())

    def mark(self) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """What `beginning` needs of the place that is reached."""
        return {number: (layer.store.added, layer.between) for number, layer in self.layers.items()}

    def beginning(self, position: int, layers: Mapping[int, tuple[int, dict[str, Tensor]]]) -> "Memory":
        """A copy that has read the text up to this position, where `mark` returned `layers`; no block was dropped."""
        return self._copy(torch.arange(self.batch_size), position, layers)

    def _copy(self, samples: Tensor, position: int, layers: Mapping[int, tuple[int, dict[str, Tensor]]]) -> "Memory":
        copied = copy.copy(self)
        copied.reset()
        copied.position = position
        for number, (blocks, between) in layers.items():
            copied.layers[number] = layer = copied.new_layer()
            self.layers[number].store.select_samples(samples, blocks, layer.store)
            layer.between = {name: x.index_select(0, samples.to(x.device)) for name, x in between.items()}
        return copied

    def save(self, folder: Path | str, others: Mapping[str, bytes] | None = None) -> None:
        """Write everything, and `others` by name, to a new folder. A memory of the same model can `load` it.

        Raises UserError, and leaves nothing behind, where the folder exists or the disk is full.
        """
        self._check_whole()
        save(Path(folder), self._identity(), self.position, self.layers, others or {})

    def load(self, folder: Path | str, device: Place = "cpu") -> None:
        """Replace the content by that of a saved memory. device: of the loaded tensors, or each layer's.

        Raises UserError, and changes nothing, for a file that is missing or altered, or a memory that does not fit.
        """
        before = self.__dict__.copy()
        self.reset()
        try:
            expected = self._identity(), self.store.max_blocks, self.new_layer
            self.position, self.layers = load(Path(folder), *expected, device)
        except BaseException:
            self.__dict__.update(before)
            raise

    def _identity(self) -> dict[str, Any]:
        """What must be equal in a memory that loads this one."""
        base = self.keys.rope_base
        return {
            "model.block_size": self.block_size,
            K: self.k,
            "model.rope_base": base.tolist() if isinstance(base, Tensor) else base,
            "positions.mapping": self.positions.name,
            "model.key_offset": self.keys.offset,
            "model.landmark_key": self.keys.landmark,
            "model.alpha": float(self.gate.alpha),
            **({} if self.keys.width is None else {"landmark_positions": False}),
            "model": None if self.model is None else self.model(),
        }

    def _check_whole(self) -> None:
        if self._torn:
            raise RuntimeError("a commit failed and layers differ: load the memory again, or reset() it")


def memory_of(block_size: int, settings: MemorySettings, **objects: Any) -> Memory:
    """A memory with these settings. objects: keys, gate, scoring, backend and observer, as of `Memory`."""
    # With the mean of their blocks in them, landmarks differ in the first layer too.
    tied = (0,) if objects.setdefault("keys", Keys()).landmark == "token" else ()
    best = Best(settings.granularity, tied)
    selectors: dict[str, Selector] = {
        "landmark": best,
        "recent": Newest(settings.granularity),
        "random": Random(settings.granularity, settings.seed),
        "mean_key": MeanKeys(settings.granularity),
        "given": Given(settings.granularity),
    }
    selector = selectors[settings.scorer]
    if settings.index != "exact":
        selector = Faiss(exact=best)
    objects |= {
        "select": selector if settings.rerank is None else SecondLook(settings.rerank, selector),
        "store": Store(settings.max_blocks, settings.tier, settings.folder, settings.cache),
        "positions": Stingy() if settings.mapping == "stingy" else TruePositions(),
    }
    memory = Memory(block_size, settings.k, **objects)
    memory.cutoff = settings.cutoff
    return memory
