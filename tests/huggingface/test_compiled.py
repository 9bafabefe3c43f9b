"""`torch.compile`: windows and the plain model are one graph, a memory stays outside; and reading waits for no GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from landmark.huggingface import LandmarkCollator, wrap
from landmark.memory import sparse_attention, sparse_attention_kernels
from tests.huggingface.conftest import make_config, make_model, make_tokenizer

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


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch is built without CUDA")
@pytest.mark.parametrize("mapping", ["true", "stingy"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_nothing_waits_and_nothing_is_elsewhere(family, mapping, monkeypatch):
    """Without a GPU: to look at its numbers on the CPU, or to mix devices, raises an error here."""
    monkeypatch.setattr(sparse_attention_kernels, "read_tiles", sparse_attention.read_tiles)
    monkeypatch.setattr(sparse_attention, "constant", sparse_attention.constant.__wrapped__)  # keeps no such tensors
    settings = {"k": 3, "window": 8, "rerank": 6, "mapping": mapping}
    model = make_model(family).bfloat16()
    model = wrap(model, make_tokenizer(), block_size=4, memory=settings, local=16, landmarks="none")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model._apply(lambda weight: torch.empty_like(weight, device="cuda"))  # without numbers
        past = model.new_memory()
        past.expect(100)
        ids = torch.empty(2, 82, dtype=torch.int64, device="cuda")
        for part in ids.split([80, 1, 1], 1):
            logits = model(part, past_key_values=past, logits_to_keep=1).logits
            assert logits.shape == (2, 1, 257)
            assert logits.is_cuda
        assert past.stats["blocks_kept"] == 20
