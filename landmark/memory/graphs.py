"""Reading a token as a CUDA graph: Python launches its operators once, and later tokens repeat them without Python."""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Graphs:
    """Runs what reads a token, in tensors whose shapes and addresses stay the same.

    1. The first time it is called as it is, on a stream of its own: kernels are compiled.
    2. The second time it is captured into a CUDA graph.
    3. From then on the graph is replayed.

    On a CPU, and with a warning where it cannot be captured, it is always called as it is.
    """

    def __init__(self, device: torch.device):
        self.device, self.captures = device, device.type == "cuda"
        self._fixed: Any = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}  # None: called once

    def run(self, read: Callable[[], Tensor], fixed: Any, kind: int = 0) -> Tensor:
        """What `read` returns; the next call overwrites it.

        fixed: what all graphs rely on; where it differs from the last call's, they begin anew. kind: has its own graph.
        """
        if self._fixed != fixed:
            self._fixed, self._graphs = fixed, {}
        if not self.captures:
            return read()
        if kind not in self._graphs:
            self._graphs[kind] = None
            return self._aside(read)
        if (captured := self._graphs[kind]) is None:
            graph, stream = torch.cuda.CUDAGraph(), _side_stream(self.device)
            current = torch.cuda.stream(torch.cuda.current_stream(self.device))  # comes back after an error too
            try:
                with _ASIDE, current, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    out = read()
            except RuntimeError as error:
                self.captures = False
                warnings.warn(f"tokens are read without a CUDA graph, which takes longer: {error}", stacklevel=2)
                return read()
            captured = self._graphs[kind] = graph, out
        captured[0].replay()
        return captured[1]

    def _aside(self, read: Callable[[], Tensor]) -> Tensor:
        """Call on the stream that captures: what is made once for each stream is then not part of a graph."""
        current, stream = (f(self.device) for f in (torch.cuda.current_stream, _side_stream))
        with _ASIDE:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                out = read()
            current.wait_stream(stream)
        return out


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_ASIDE = threading.Lock()  # one thread at a time uses the side stream
