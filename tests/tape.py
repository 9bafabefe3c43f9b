"""What stands for a CUDA graph where there is no GPU."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh")  # the host waits, or gives numbers


def name_of(func):
    return func.name().removeprefix("aten::") if hasattr(func, "name") else "a kernel"


class Tape(TorchDispatchMode):
    """Stands for a CUDA graph: records operators and kernels with the tensors they were called with, to repeat them."""

    def __init__(self, waits=False):
        """waits: whether operators may be among them that wait for the device, which a graph cannot hold."""
        super().__init__()
        self.calls, self.replays, self._waits = [], 0, waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert self._waits or not name_of(func).startswith(WAITING), f"{func} in a CUDA graph"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @contextmanager
    def capture(self, **settings):
        launch = GridExecutor.__call__

        def recorded(kernel, *args, **kwargs):
            self.calls.append((lambda *a, **k: launch(kernel, *a, **k), args, kwargs, None))
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)

        with mock.patch.object(GridExecutor, "__call__", recorded), self:
            yield

    @property
    def operators(self):
        """Names of the kernels and operators that are no views."""
        names = [name_of(func) for func, *_ in self.calls if not getattr(func, "is_view", False)]
        return [name for name in names if "view" not in name]

    @property
    def launches(self):
        """Of these, such as do more than to make room."""
        return [name for name in self.operators if not name.startswith(("empty", "new_empty"))]

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tapes_of(monkeypatch):
    """The tapes that are recorded in place of CUDA graphs."""
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Tape()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: graph.capture(**settings))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr("landmark.memory.graphs._side_stream", lambda device: mock.Mock())
    return made
