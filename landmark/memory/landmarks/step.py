"""The next token of a memory's text, in tensors whose shapes and addresses stay the same, as a CUDA graph needs them.

A token takes a GPU a few hundred microseconds, and Python several milliseconds to launch operator by operator.
A `Memory` joins and cuts tensors as its text goes on, and counts in Python: its operators differ from token to token.
Here the last block has a buffer with places for all its tokens, and kernels read the counts on the device::

    the text           … block 8 │ block 9 │ a b c d           ℓ = 5
    the buffer                               a b c d · ·       pending = 4: the next token has the fifth place,
                                                               and the landmark that closes the block the sixth
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from landmark.attention import backend_for, has_kernel
from landmark.attention.fused.tuning import DTYPES, MOST_BLOCKS
from landmark.memory.graphs import Graphs
from landmark.memory.landmarks.layer import Lags, LayerMemory, Stingy
from landmark.memory.landmarks.memory import Memory
from landmark.memory.landmarks.select import Best
from landmark.memory.tiers import new_buffer

ALONE = "per_token_and_head", "per_head"  # granularities in which a single token of a head chooses its own blocks


def can_step(memory: Any, q: Tensor) -> bool:
    """Whether a `Step` reads with this memory: the paper's, whose kernels run. q: (…, d), like the queries."""
    kinds = (type(memory), type(getattr(memory, "select", None)), type(getattr(memory, "positions", None)))
    if kinds != (Memory, Best, Stingy) or memory.store.tier != "device" or memory.observer is not None:
        return False
    plain_keys = memory.keys.offset == 0 and memory.keys.landmark == "token"
    if not plain_keys or memory.select.granularity not in ALONE or memory.k > MOST_BLOCKS or q.dtype not in DTYPES:
        return False
    computes = has_kernel(memory.gate, memory.scoring)
    return computes and backend_for(memory.backend, q, memory.block_size, computes) == "triton"


class Step:
    """Reads a token, with the landmark behind it where it completes a block. One after the other:

    1. `begin` brings the buffers up to date, if the memory has read anything by itself.
    2. Every layer calls `attend`: locally, choose, read and merge, as in `Memory`. A CUDA graph holds this part.
    3. `commit` gives the memory the tokens, as if it had read them itself. So both may take turns.
    """

    landmark_at = None  # models whose layers ask for it are not read by steps

    def __init__(self, memory: Memory):
        """memory: one that has read something, and with which one `can_step`."""
        self.memory = memory
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, keys and values (B, H_kv, W, d), not rotated
        self._factors: dict[int, Tensor] = {}  # by layer, rotary, of a block's positions at lag 0…k+1
        self._between: dict[int, dict[str, Tensor]] = {}  # by layer, what the memory got from here
        self._fixed: tuple[int, ...] | None = None
        self._heads = 0  # B·H
        assert self._first.pending is not None
        self.device = self._first.pending[0].device
        counter = {"dtype": torch.int64, "device": self.device}
        self._pending, self._added = new_buffer(**counter), new_buffer(**counter)  # tokens and blocks, on the device

    @property
    def _first(self) -> LayerMemory:
        return next(iter(self.memory.layers.values()))

    @property
    def _lags(self) -> Lags:
        return self.memory.positions.lags(self._first.store.added, self.memory.k, self.memory.width)

    def begin(self) -> int | None:
        """The tokens to read now: 1, or 2 with a landmark. None: the memory must read this token by itself."""
        if not self.memory.layers or self._first.pending is None:
            return None
        pending = self._first.num_pending
        tokens = 2 if pending + 1 == self.memory.block_size else 1
        if tokens == 2 and self.memory.select.granularity == "per_head":  # the landmark helps to choose
            return None
        for layer, state in self.memory.layers.items():
            if state.between is not self._between.get(layer):
                self._take(layer, state)
        self._pending.fill_(pending)
        self._added.fill_(self._first.store.added)
        return tokens

    def _take(self, layer: int, state: LayerMemory) -> None:
        """Copy the pending tokens that the memory has."""
        assert state.pending is not None
        (batch, heads, count, dim), like = state.pending[0].shape, state.pending[0]
        shape = batch, heads, self.memory.width, dim
        if layer not in self._buffers or self._buffers[layer][0].shape != shape:
            made = [new_buffer(*shape, dtype=like.dtype, device=like.device) for _ in range(2)]
            self._buffers[layer] = made[0], made[1]
            factors = self.memory.keys.rotary(layer)(0, (self.memory.k + 2) * self.memory.width, like)
            self._factors[layer] = torch.view_as_real(factors).clone()
        for buffer, pending in zip(self._buffers[layer], state.pending, strict=True):
            buffer[:, :, :count] = pending
        self._fixed = None

    @property
    def fixed(self) -> tuple[int, ...]:
        """What a CUDA graph relies on: the numbers of blocks and lags, and where the tensors are."""
        if self._fixed is None:
            stores = [state.store for state in self.memory.layers.values()]
            counts = min(len(stores[0]), self.memory.k + 1), len(self._lags.distances), stores[0].capacity
            tensors = [buffer for pair in self._buffers.values() for buffer in pair]
            tensors += [x for store in stores for x in (store.landmarks, *(store.in_place() or ()))]
            self._fixed = *counts, *(x.data_ptr() for x in tensors)
        return self._fixed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Memory.attend`, (B, H, T, d). Args: as there."""
        from landmark.memory.landmarks.reading_kernels import attend_to_pending_tokens, attend_to_retrieved_blocks
        from landmark.memory.landmarks.select.scores_kernels import top_k_landmarks

        memory, store, (keys, values) = self.memory, self.memory.layers[layer].store, self._buffers[layer]
        lags, count, self._heads = self._lags, min(memory.k, len(store)), q.shape[0] * q.shape[1]
        buffers = {"keys": keys, "values": values, "pending": self._pending, "factors": self._factors[layer]}
        scoring = {"scale": memory.scoring.scale_of(q.shape[-1]), "lags": len(lags.distances)}
        local = attend_to_pending_tokens(q, k, v, **buffers, **scoring)  # 1
        blocks = store.in_place()
        if count == 0 or blocks is None:
            return local.out
        stored: dict[str, Any] = {"added": self._added, "recent": lags.own}
        if count == len(store):
            ages = torch.arange(count, 0, -1, device=q.device).expand(*q.shape[:3], count)
        else:
            assert isinstance(memory.select, Best)
            tied = layer in memory.select.tied_layers
            ages = top_k_landmarks(local.exact, store.landmarks, **stored, k=count, tied=tied)  # 2
        merged = {"local": (local.out, local.lse), "alpha": memory.gate.alpha}
        return attend_to_retrieved_blocks(local.rounded, *blocks, store.landmarks, ages, **stored, **merged)  # 3, 4

    def commit(self, tokens: int) -> None:
        """End the chunk of so many tokens, which `begin` has told."""
        count = self._first.num_pending + tokens
        chunks = {
            layer: {"pending_keys": keys[:, :, :count], "pending_values": values[:, :, :count]}
            for layer, (keys, values) in self._buffers.items()
        }
        self.memory.take(chunks, tokens, self._heads * tokens)
        if tokens == 2:  # there is a block more
            self._fixed = None
        self._between = {layer: state.between for layer, state in self.memory.layers.items()}


class NextToken:
    """Reads one token of each text, for a model and a memory, by `Graphs`. The memory may be used by itself in between.

    A token that completes a block is read together with the block's landmark, by a graph of its own. Where the memory's
    tensors have grown since, or there were not more than k blocks, the graphs begin anew.
    """

    def __init__(self, model: Any, memory: Memory, landmark: int):
        """model: without options that need to know which tokens are landmarks. memory: one that has read something, and
        with which one `can_step`."""
        self._model, self._memory, self._step, self._landmark = model, memory, Step(memory), landmark
        self._tokens = torch.empty(0, 2, dtype=torch.int64)  # (B, 2), tokens and landmarks
        self.graphs = Graphs(self._step.device)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, 1, vocabulary) after raw ids (B, 1). The next call overwrites them."""
        count = self._step.begin()
        if count is None:
            return self._model(tokens, memory=self._memory, last=True)
        if len(self._tokens) != len(tokens):
            self._tokens = new_buffer(len(tokens), 2, dtype=torch.int64, device=tokens.device)
            self._tokens.fill_(self._landmark)
        self._tokens[:, :1] = tokens
        fixed = self._tokens.data_ptr(), *self._step.fixed
        logits = self.graphs.run(partial(self._read, count), fixed, count)
        self._step.commit(count)
        return logits

    def _read(self, count: int) -> Tensor:
        hidden = self._model.hidden(self._tokens[:, :count], memory=self._step)
        return self._model.head(hidden[:, :1])
