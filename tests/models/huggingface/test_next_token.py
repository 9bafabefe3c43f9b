"""A token of a wrapped model as a CUDA graph: recorded once and repeated for later tokens, with interpreted kernels."""

import copy
import gc
import weakref

import pytest
import torch

from landmark.memory.graphs import Graphs
from landmark.models.huggingface import wrap
from landmark.models.huggingface.next_token import replaying
from tests.models.huggingface.conftest import EAGER, make_model, make_tokenizer
from tests.tape import tapes_of

START, TOKENS = 47, 13
SETTINGS = {"k": 3, "window": 7, "dense": 51, "mapping": "auto"}
FAMILIES = ("llama3", "gemma", "smollm3", "gpt_neox")  # whose layers rotate keys, none of them, or a part
OTHERS = ("gemma2", "gpt_oss")  # have windows or experts: kernels, but no graph


@pytest.fixture
def tapes(monkeypatch):
    """Those made in place of CUDA graphs. There are kernels, and graphs, where a cache is on the CPU."""
    monkeypatch.setattr("landmark.memory.blocks.cache.has_kernels", lambda *_: True)
    monkeypatch.setattr("landmark.models.huggingface.next_token.Graphs", recording)
    return tapes_of(monkeypatch)


def recording(device):
    graphs = Graphs(device)
    graphs.captures = True
    return graphs


def new_model(name):
    model = make_model(name, "eager" if name in EAGER else "sdpa")
    model = wrap(model, make_tokenizer(), landmarks="none", block_size=5, memory=SETTINGS)
    model.config.max_position_embeddings = 56  # in the middle of the tokens
    return model


def read_on(model, cache, ids):
    with torch.no_grad():
        return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, 1)], 1)


@pytest.mark.parametrize("name", FAMILIES + OTHERS)
def test_what_is_recorded_once_is_right_for_later_tokens(name, tapes):
    """With all keys, with chosen blocks, beyond the trained positions, and where the tensors have grown."""
    model = new_model(name)
    ids = torch.randint(0, 256, (1, START + TOKENS), generator=torch.Generator().manual_seed(0))
    found, expected = model.new_memory(), model.new_memory(observer=lambda retrieval: None)  # kernels tell no observer
    for cache in (found, expected):
        model(ids[:, :START], past_key_values=cache)
    expected = read_on(model, expected, ids[:, START:])
    assert not tapes
    torch.testing.assert_close(read_on(model, found, ids[:, START:]), expected, rtol=2e-4, atol=2e-5)
    assert torch.equal(found.ids, ids)
    # A graph is made for the second token of a kind: of 47 to 49, of 50, with more room, of 51 to 54, and of 55 to 59.
    assert [tape.replays for tape in tapes] == ([2, 3, 4] if name in FAMILIES else [])


def test_where_a_graph_would_be_wrong(tapes):
    """Hooks would not run, and dropout of a model in training be that of one token; nor is what is observed seen."""
    model = new_model("llama3")
    cache, ids = model.new_memory(), torch.zeros(1, 60, dtype=torch.int64)
    assert replaying(model, cache, ids[:, :1]) is None  # nothing is read yet
    model(ids, past_key_values=cache)
    assert replaying(model, cache, ids[:, :1]) is not None
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert replaying(model, cache, ids[:, :1]) is None
    hook.remove()
    assert replaying(model.train(), cache, ids[:, :1]) is None
    assert replaying(model.eval(), cache, ids[:, :1]) is not None
    model.model.layers[0].mlp.adapter_layer_names = ("lora_A",)  # as PEFT's layers: may be switched between tokens
    assert replaying(model, cache, ids[:, :1]) is None
    del model.model.layers[0].mlp.adapter_layer_names
    with torch.autocast("cpu"):
        assert replaying(model, cache, ids[:, :1]) is None
    for tier in ("cpu", "disk"):
        kept = model.new_memory(tier=tier)
        model(ids, past_key_values=kept)
        assert replaying(model, kept, ids[:, :1]) is None


def test_a_memory_is_freed_when_nobody_has_it(tapes):
    """At once, and not when garbage is collected: it may hold most of a GPU's memory."""
    model = new_model("llama3")
    cache, ids = model.new_memory(), torch.zeros(1, START, dtype=torch.int64)
    model(ids, past_key_values=cache)
    with torch.inference_mode():
        model(ids[:, :1], past_key_values=cache)
    read_on(model, cache, ids[:, :3])
    assert tapes
    assert copy.deepcopy(cache.next_token) is None  # a CUDA graph cannot be copied
    keys = weakref.ref(cache.memory.layers[0].keys)
    tapes.clear()
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()


def test_a_graph_that_cannot_be_captured_is_done_without(tapes, monkeypatch):
    model = new_model("llama3")
    cache, ids = model.new_memory(), torch.zeros(1, START, dtype=torch.int64)
    model(ids, past_key_values=cache)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Refusing())
    with pytest.warns(UserWarning, match="without a CUDA graph, which takes longer: operation not permitted"):
        found = read_on(model, cache, ids[:, :3])
    assert cache.get_seq_length() == START + 3
    assert found.isfinite().all()
    assert not tapes


class Refusing:
    def capture(self, **_):
        raise RuntimeError("operation not permitted")
