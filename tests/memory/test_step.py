"""Tokens that are read in tensors of fixed shapes, with interpreted kernels: the numbers of the ordinary path."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from landmark.memory import Memory, Store, TruePositions
from landmark.memory.select import Best, Newest
from landmark.memory.step import NextToken, can_step
from landmark.models import DecoderConfig
from landmark.models.config import Landmarks
from tests.pairs import all_pairs, name_of
from tests.saved import random_decoder

LANDMARK, VOCABULARY = 30, 32


def decoder(block_size=5, heads=(2, 2), dtype=torch.float32, dim=8):
    widths = {"num_layers": 2, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dim, "mlp_dim": 16}
    config = DecoderConfig(VOCABULARY, **widths, landmarks=Landmarks(LANDMARK, block_size), backend="triton")
    return random_decoder(config).to(dtype)


def read(model, memory, tokens):
    with torch.no_grad():
        return model(tokens, memory=memory, last=True)


CASES = all_pairs(
    {
        "block_size": [1, 2, 3],
        "prompt": [1, 9, 17],
        "heads": [(2, 2), (2, 1)],
        "batch": [1, 2],
        "dim": [8, 20],
        "k": [0, 1, 3],
        "max_blocks": [None, 3, 6],
        "granularity": ["per_token_and_head", "per_head"],
    }
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits_are_those_of_the_ordinary_path(case, new_memory_is_nan):
    """Both read the prompt, then token by token; by turns too: each goes on with what the other has left."""
    model = decoder(case["block_size"], case["heads"], dim=case["dim"])
    settings = {name: case[name] for name in ("k", "max_blocks", "granularity")}
    memory, other = model.new_memory(**settings), model.new_memory(**settings, backend="blockwise")
    text = torch.randint(0, LANDMARK, (case["batch"], case["prompt"] + 7))
    for each in (memory, other):
        read(model, each, text[:, : case["prompt"]])
    assert can_step(memory, model.embedding.weight)
    read_next = NextToken(model, memory, LANDMARK)
    for number, token in enumerate(text[:, case["prompt"] :].split(1, 1)):
        by_itself = number in (3, 5, 6)
        ours = read(model, memory, token) if by_itself else read_next(token)
        torch.testing.assert_close(ours, read(model, other, token), atol=2e-5, rtol=2e-5)
    assert memory.position == other.position
    for name in ("chunks", "searches", "lookups", "retrievals", "blocks_retrieved", "blocks_kept"):
        assert memory.stats[name] == other.stats[name], name
    for layer, state in memory.layers.items():
        torch.testing.assert_close(state.pending, other.layers[layer].pending, atol=2e-5, rtol=2e-5)
        assert len(state.store) == len(other.layers[layer].store)


def test_half_precision():
    model = decoder(3, heads=(2, 1), dtype=torch.float16)
    memory, other = model.new_memory(k=2), model.new_memory(k=2, backend="blockwise")
    text = torch.randint(0, LANDMARK, (1, 17))
    for each in (memory, other):
        read(model, each, text[:, :13])
    read_next = NextToken(model, memory, LANDMARK)
    for token in text[:, 13:].split(1, 1):
        ours, expected = read_next(token).float(), read(model, other, token).float()
        assert (ours - expected).norm() <= 0.02 * expected.norm()


class Tape(TorchDispatchMode):
    """Stands for a CUDA graph: records operators and kernels with the tensors they were called with, to repeat them."""

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def tapes(monkeypatch):
    """The tapes that are recorded in place of CUDA graphs."""
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Tape()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: graph.capture(**settings))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr("landmark.memory.step._side_stream", lambda device: mock.Mock())
    return made


def test_what_is_recorded_once_is_right_for_later_tokens(tapes):
    """From the beginning of a text on: while there are few blocks, where the store grows, and after both."""
    model = decoder(3, (2, 1))
    memory, other = model.new_memory(k=1), model.new_memory(k=1, backend="blockwise")
    text = torch.randint(0, LANDMARK, (1, 19))
    for each in (memory, other):
        read(model, each, text[:, :1])
    read_next = NextToken(model, memory, LANDMARK)
    read_next._run = read_next._by_graph
    for token in text[:, 1:].split(1, 1):
        torch.testing.assert_close(read_next(token), read(model, other, token), atol=2e-5, rtol=2e-5)
    assert [tape.replays for tape in tapes] == [1, 8, 3]


def test_other_memories_read_by_themselves():
    q = torch.randn(1, 8)
    assert can_step(Memory(5, backend="triton"), q)
    assert not can_step(Memory(5), q)  # there is no GPU
    assert not can_step(Memory(5, backend="triton"), q.double())
    for other in (
        {"select": Newest("per_head")},
        {"select": Best(newest=1)},
        {"select": Best("per_token")},
        {"positions": TruePositions()},
        {"store": Store(tier="cpu")},
        {"observer": print},
        {"k": 17},
    ):
        assert not can_step(Memory(5, backend="triton", **other), q), other
    assert not can_step(None, q)


def test_generated_tokens_are_the_same(monkeypatch):
    model, prompts = decoder(3), [torch.randint(0, LANDMARK, (length,)) for length in (10, 5)]
    expected = model.generate(prompts, 5, memory=lambda: model.new_memory(k=2))
    made = []
    monkeypatch.setattr(model, "reading", lambda memory: made.append(NextToken(model, memory, LANDMARK)) or made[-1])
    assert model.generate(prompts, 5, memory=lambda: model.new_memory(k=2)) == expected
    assert made
