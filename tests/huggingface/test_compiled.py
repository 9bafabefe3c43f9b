"""`torch.compile` of a wrapped model: windows and the plain model in one graph, the memory outside of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from landmark.huggingface import LandmarkCollator, wrap
from tests.huggingface.conftest import make_config, make_tokenizer

BLOCK = 5


@pytest.fixture
def wrapped():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=1))
    return wrap(model, make_tokenizer(), block_size=BLOCK, memory={"k": 2}, local=8)


def step(model, call, batch):
    model.zero_grad()
    loss = call(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]


@pytest.mark.parametrize("packed", [False, True])
def test_training_is_one_graph(wrapped, packed, monkeypatch):
    monkeypatch.setattr("landmark.attention.backend_for", lambda *_: "triton")
    documents = [{"input_ids": torch.randint(0, 256, (length,)).tolist()} for length in (40, 13)]
    batch = LandmarkCollator(wrapped, length=17, packed=packed)(documents)
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    found, expected = (step(wrapped.train(), call, batch) for call in (compiled, wrapped))
    without = wrapped.eval()(batch["input_ids"], labels=batch["labels"], use_cache=False).loss
    assert not torch.allclose(without, expected[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_the_model_without_landmarks_is_one_graph(wrapped):
    ids = torch.randint(0, 256, (2, 20))
    compiled = torch.compile(wrapped.eval(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids, use_cache=False).logits, wrapped(ids, use_cache=False).logits)


@torch.no_grad()
def test_reading_with_a_memory_stays_outside_of_the_graph(wrapped):
    """Nothing of it is compiled, so that it neither takes minutes nor fails."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    ids = torch.randint(0, 256, (1, 40))
    compiled, memory, same = torch.compile(wrapped.eval(), backend=backend), wrapped.new_memory(), wrapped.new_memory()
    for part in ids.split(17, 1):
        found, expected = compiled(part, past_key_values=memory).logits, wrapped(part, past_key_values=same).logits
        assert torch.equal(found, expected)
    assert not any(node.op == "call_module" or "linear" in str(node.target) for g in graphs for node in g.graph.nodes)
    settings = {"max_new_tokens": 3, "do_sample": False}
    expected = wrapped.generate(ids, **settings)
    wrapped.compile(backend=backend)
    assert torch.equal(wrapped.generate(ids, **settings), expected)
