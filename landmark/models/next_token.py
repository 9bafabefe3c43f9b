"""Reading generated tokens one after the other, each as one CUDA graph: Python launches nothing but the graph.

A token takes a GPU a few hundred microseconds, and Python several milliseconds to launch operator by operator.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from landmark.memory.memory import Memory
from landmark.memory.step import Step
from landmark.memory.store.block_cache import new_buffer


class NextToken:
    """Reads one token of each text, for a model and a memory. The memory may be used by itself in between.

    1. The first time, the layers are called as they are, on a stream of their own: kernels are compiled.
    2. The second time they are captured into a CUDA graph.
    3. From then on the graph is replayed.

    A token that completes a block is read together with the block's landmark, by a graph of its own. After that the
    memory has a block more; where its tensors have grown, or there were not more than k blocks, it begins anew at 1. On
    a CPU there is no graph, and the layers are always called as they are.
    """

    def __init__(self, model: Any, memory: Memory, landmark: int):
        """model: without options that need to know which tokens are landmarks. memory: one that has read something, and
        with which one `landmark.memory.step.can_step`."""
        self._model, self._memory, self._step, self._landmark = model, memory, Step(memory), landmark
        self._tokens = torch.empty(0, 2, dtype=torch.int64)  # (B, 2), tokens and landmarks
        self._fixed: tuple[int, ...] = ()  # what the graphs rely on
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}  # by tokens; None: called once
        self._run = self._by_graph if self._step.device.type == "cuda" else self._read

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, 1, vocabulary) after raw ids (B, 1). The next call overwrites them."""
        count = self._step.begin()
        if count is None:
            return self._model(tokens, memory=self._memory, last=True)
        if len(self._tokens) != len(tokens):
            self._tokens, self._fixed = new_buffer(len(tokens), 2, dtype=torch.int64, device=tokens.device), ()
            self._tokens.fill_(self._landmark)
        self._tokens[:, :1] = tokens
        if self._fixed != self._step.fixed:
            self._fixed, self._graphs = self._step.fixed, {}
        logits = self._run(count)
        self._step.commit(count)
        return logits

    def _read(self, count: int) -> Tensor:
        hidden = self._model.hidden(self._tokens[:, :count], memory=self._step)
        return self._model.head(hidden[:, :1])

    def _by_graph(self, count: int) -> Tensor:
        """`_read` by a graph, once there is one."""
        if count not in self._graphs:
            self._graphs[count] = None
            return self._aside(count)
        if (captured := self._graphs[count]) is None:
            graph, device = torch.cuda.CUDAGraph(), self._tokens.device
            with _ASIDE, torch.cuda.graph(graph, stream=_side_stream(device), capture_error_mode="thread_local"):
                logits = self._read(count)
            captured = self._graphs[count] = graph, logits
        captured[0].replay()
        return captured[1]

    def _aside(self, count: int) -> Tensor:
        """`_read` on the stream that captures: what is made once for each stream is then not part of a graph."""
        current, stream = (f(self._tokens.device) for f in (torch.cuda.current_stream, _side_stream))
        with _ASIDE:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                logits = self._read(count)
            current.wait_stream(stream)
        return logits


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_ASIDE = threading.Lock()  # one thread at a time uses the side stream
