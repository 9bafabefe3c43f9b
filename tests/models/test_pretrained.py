"""Models of transformers in the program's own training and evaluation."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.config.schema import ModelConfig
from landmark.huggingface import LandmarkModel
from landmark.huggingface import load as load_wrapped
from landmark.inspector.trace import NO_BLOCK, trace_retrieval
from landmark.models import decoder_config, save
from landmark.models import load as load_model
from landmark.models.config import Landmarks
from landmark.models.pretrained import load_pretrained, start_from, weights_sha256
from landmark.training import train
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model, make_tokenizer
from tests.saved import hash_again
from tests.training.training_case import TOKENIZER, identity_of, make_config, make_corpus

BLOCK = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained model, as far as anyone can tell."""
    folder = tmp_path_factory.mktemp("trained")
    make_model("llama").save_pretrained(folder)
    return folder


def shape(kind="landmark"):
    model = ModelConfig(kind=kind, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32, block_size=BLOCK)
    return decoder_config(model, TOKENIZER)


def fine_tune(model, tmp_path, kind="landmark", **changes):
    """A few steps on made-up text, in place."""
    config = make_config(kind, steps=3, max_lr=1e-2, **changes)
    run = tmp_path / "run"
    run.mkdir()
    corpus = make_corpus(tmp_path / "data")
    return train(model, corpus, TOKENIZER, config, run, [], identity_of(config, corpus, "weights")), run


def embedding(model):
    return model.bare.get_input_embeddings().weight.detach().clone()


@pytest.mark.parametrize("tied", [False, True])
def test_only_adapters_and_the_landmarks_embedding_are_trained(folder, tmp_path, tied):
    if tied:
        model = make_model("gemma")
        folder = tmp_path / "tied"
        model.save_pretrained(folder)
    start = start_from(str(folder), shape())
    before, token = embedding(start), TOKENIZER.landmark
    torch.testing.assert_close(before[token], before[:token].mean(0))
    model = start_from(str(folder), shape(), lora_rank=2)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or "trainable_tokens" in name for name in trained)
    assert any("trainable_tokens" in name for name in trained)
    torch.manual_seed(0)
    summary, run = fine_tune(model, tmp_path)
    assert summary["steps"] == 3
    again = load_model(run)
    after = embedding(again)
    assert isinstance(again.bare, LandmarkModel)
    assert not torch.allclose(after[token], before[token], atol=1e-3)
    others = torch.arange(len(before)) != token
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
    projection = "model.layers.1.self_attn.v_proj.weight"
    assert not torch.allclose(again.bare.state_dict()[projection], start.bare.state_dict()[projection], atol=1e-4)


def test_everything_is_trained_without_adapters(folder, tmp_path):
    model = start_from(str(folder), shape())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    _, run = fine_tune(model, tmp_path)
    after = dict(load_model(run).named_parameters())
    assert before.keys() == after.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still
    token = TOKENIZER.landmark
    moved = after["model.model.embed_tokens.weight"][token] - before["model.model.embed_tokens.weight"][token]
    assert moved.norm() > 1e-3


def test_a_trained_run_is_what_transformers_saves(folder, tmp_path):
    """`landmark.huggingface.load` opens a run's folder, with the tokenizer that came with the model."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<landmark>"], special_tokens=True)
    model = start_from(str(folder), shape(), tokenizer=tokenizer)
    save(model, tmp_path)
    wrapped, _ = load_wrapped(tmp_path)
    ids = torch.randint(0, 256, (1, 60))
    memory = model.new_memory(k=2)
    found = torch.cat([model(chunk, memory=memory) for chunk in ids.split(20, 1)], 1)
    expected = wrapped(ids, past_key_values=wrapped.new_memory(k=2), local=20).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_plain_model_that_is_trained_further_reads_through_blocks(folder, tmp_path, lora_rank):
    """Its first loss is the model's own; afterwards, with all blocks, it reads as its weights alone do."""
    plain = shape().without_landmarks()
    start = start_from(str(folder), plain)
    ids = torch.randint(0, 256, (1, 60))
    before = start(ids).detach()
    torch.testing.assert_close(start_from(str(folder), plain, lora_rank=lora_rank)(ids), before, rtol=0, atol=0)
    _, run = fine_tune(start_from(str(folder), plain, lora_rank=lora_rank), tmp_path, kind="transformer")
    reading = dataclasses.replace(plain, landmarks=Landmarks(None, BLOCK))
    tuned, blocks = load_pretrained(run), load_pretrained(run, reading)
    with torch.no_grad():
        assert not torch.allclose(tuned(ids), before, atol=1e-3)
        memory = blocks.new_memory(k=100, window=4)
        read = torch.cat([blocks(chunk, memory=memory) for chunk in ids.split(7, 1)], 1)
        torch.testing.assert_close(read, tuned(ids), rtol=0, atol=1e-4)
        assert memory.stats["blocks_kept"] > 8


@torch.no_grad()
def test_its_retrieval_is_traced(folder):
    """With a k of all blocks every query reads each block before its chunk; the losses are those of a plain reading."""
    model = start_from(str(folder), shape()).eval()
    ids = np.arange(60) * 7 % 256
    trace = trace_retrieval(model, ids, local=20, k=12)
    assert trace.chunks == [0, 24, 48]  # in the stream, which has a landmark after every fifth token
    for start, blocks in ((0, 0), (24, 4), (48, 8)):
        read = trace.blocks[..., start : start + 24]
        assert (np.sort((read != NO_BLOCK).sum(2), None) == blocks).all()
        assert (read[:, :, :blocks] == np.arange(blocks)[None, None, :, None]).all()
    assert ((trace.weights >= 0) & (trace.weights.sum(2, keepdims=True) <= 1 + 1e-5)).all()
    memory, text = model.new_memory(k=12), torch.from_numpy(ids)[None]
    logits = torch.cat([model(chunk, memory=memory) for chunk in text.split(20, 1)], 1)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], text[0, 1:], reduction="none")
    np.testing.assert_allclose(trace.losses, expected, atol=1e-4)


@torch.no_grad()
def test_a_plain_model_goes_on_with_its_own_cache_and_a_window_equals_a_memory_of_everything(folder):
    model = load_pretrained(folder).eval()
    ids = torch.randint(0, 256, (2, 30))
    assert model.new_memory() is None
    expected = model.bare.generate(ids, max_new_tokens=5, do_sample=False)[:, 30:]
    assert model.generate(ids, 5, local=12) == expected.tolist()
    with pytest.raises(UserError, match="window"):
        model.new_memory(window=5)
    model = start_from(str(folder), shape()).eval()
    ids = torch.randint(0, 256, (2, 40))
    memory = model.new_memory(k=100)
    chunks = torch.cat([model(chunk, memory=memory) for chunk in ids.split(11, 1)], 1)
    torch.testing.assert_close(model(ids), chunks, rtol=0, atol=1e-4)
    torch.testing.assert_close(model(ids, last=True), chunks[:, -1:], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_model_with_landmarks_generates_as_transformers_does(folder):
    model = start_from(str(folder), shape()).eval()
    ids = torch.randint(0, 256, (2, 30))
    expected = model.bare.generate(ids, max_new_tokens=7, do_sample=False, past_key_values=model.new_memory(k=2))
    memory = model.new_memory(k=2)
    assert model.generate(ids, 7, memory=memory) == expected[:, 30:].tolist()
    assert memory.get_seq_length() == 36
    assert [step[0] for step in model.stream(ids, 7, memory=lambda: model.new_memory(k=2))] == expected[0, 30:].tolist()
    several = [ids[0], ids[1][:9]]
    assert [len(text) for text in model.generate(several, 3)] == [3, 3]
    with pytest.raises(UserError, match="several lengths"):
        model.generate(several, 3, memory=model.new_memory())


def test_models_that_do_not_fit_are_refused(folder, tmp_path):
    save(start_from(str(folder), shape()), tmp_path / "run")
    run = tmp_path / "run"
    other = dataclasses.replace(shape(), landmarks=Landmarks(TOKENIZER.landmark, 7))
    for use, said in (
        (lambda: start_from(str(tmp_path / "nowhere"), shape()), r"there is no such folder"),
        (lambda: weights_sha256(str(tmp_path)), r"holds no config\.json"),
        (lambda: start_from(str(run), shape("transformer")), "was trained with landmarks"),
        (lambda: start_from(str(run), other), "block_size=7"),
        (lambda: load_pretrained(run, other), "block_size is 5, not 7"),
    ):
        with pytest.raises(UserError, match=said):
            use()
    (run / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:5000])
    for said in (r"model\.safetensors is damaged", "no causal language model"):
        with pytest.raises(UserError, match=said):
            load_pretrained(run)
        hash_again(run)


def test_the_same_weights_are_the_same_start_wherever_they_are(folder, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "a")
    make_model("llama", seed=1).save_pretrained(tmp_path / "b")
    assert weights_sha256(str(tmp_path / "a")) == weights_sha256(str(folder))
    assert weights_sha256(str(tmp_path / "b")) != weights_sha256(str(folder))
