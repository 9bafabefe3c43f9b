"""Pretrained models that read without landmarks: with all blocks the model itself, else its attention to fewer keys."""

import copy
import logging
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import landmark.attention.plain as attention
from landmark.models.huggingface import unwrap, wrap
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import EAGER, make_model, make_tokenizer, read

ALL = {"k": 100, "window": 7}
FEW = {"k": 3, "window": 7, "dense": 0}


def make(family, tokenizer, memory=ALL, **settings):
    """A model and the same without landmarks, in float64."""
    model = make_model(family, "eager" if family in EAGER else "sdpa").double()
    plain = copy.deepcopy(model)
    return wrap(model, tokenizer, landmarks="none", **{"block_size": 5, "local": 17, **settings}, memory=memory), plain


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "mapping"), [("qwen2", "true"), ("qwen2", "auto"), ("qwen2", "stingy"), ("gemma3", "auto")]
)
def test_chunks_do_not_show(name, mapping, ids, tokenizer):
    """The same blocks are chosen whether a text is read in one call or in several, many tokens at a time or few."""
    wrapped, plain = make(name, tokenizer, {**FEW, "mapping": mapping})
    wrapped.config.max_position_embeddings = 60
    expected = read(wrapped, ids, parts=[90])
    for parts in ([40, 1, 1, 48], [3, 5, 82], [1] * 90):
        torch.testing.assert_close(read(wrapped, ids, parts=parts), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(ids, past_key_values=wrapped.new_memory(), local=1).logits, expected)
        assert (plain(ids).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_is_read_in_tiles_and_its_last_token_alone(name, ids, tokenizer):
    """However it is cut: the tokens without logits choose together, those with logits alone."""
    wrapped, _ = make(name, tokenizer, FEW)
    together, alone = wrapped.new_memory(), wrapped.new_memory()
    with torch.no_grad():
        last = wrapped(ids[:, :60], past_key_values=together, logits_to_keep=1).logits
        cut = wrapped(ids[:, :60], past_key_values=wrapped.new_memory(), logits_to_keep=1, local=5).logits
        every = wrapped(ids[:, :60], past_key_values=alone).logits[:, -1:]
        torch.testing.assert_close(cut, last, rtol=0, atol=1e-12)
        assert (last - every).abs().max() > 1e-4
        more = [wrapped(ids[:, 60:], past_key_values=each).logits for each in (together, alone)]
    assert (more[0] - more[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_products_in_bfloat16_are_as_exact_as_pytorchs_kernels(name, ids, tokenizer, monkeypatch):
    """Of all keys, chosen blocks and sliding windows: against the same model in float64."""
    wrapped, _ = make(name, tokenizer, {"k": 20, "window": 7, "dense": 0}, local=64)
    monkeypatch.setattr(attention, "_flash_has_units", lambda: False)
    with torch.no_grad():
        exact = wrapped(ids, past_key_values=wrapped.new_memory(), logits_to_keep=30).logits
        wrapped.bfloat16()
        errors = []
        for has_units in (True, False):
            monkeypatch.setattr(attention, "has_units", lambda device, has_units=has_units: has_units)
            found = wrapped(ids, past_key_values=wrapped.new_memory(), logits_to_keep=30).logits
            errors.append((found - exact).norm() / exact.norm())
    assert errors[0] != errors[1]
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_text_that_was_announced_takes_room_once(ids, tokenizer, tier):
    """However many parts it is read in: the memory is not copied to a larger place for each."""
    wrapped, _ = make("llama", tokenizer, FEW)
    whole, parts = (wrapped.new_memory(tier=tier) for _ in range(2))
    read(wrapped, ids[:, :80], whole)
    parts.expect(80)
    places = set()
    for part in ids[:, :80].split(7, 1):
        read(wrapped, part, parts)
        places.add(parts.memory.layers[0].keys.data_ptr())
    assert len(places) == 1
    assert parts.stats["bytes_kept"] == whole.stats["bytes_kept"]


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generates_what_the_model_generates(name, settings, ids, tokenizer):
    wrapped, plain = make(name, tokenizer)
    settings = {"max_new_tokens": 12, "do_sample": False, **settings}
    assert torch.equal(wrapped.generate(ids, **settings), plain.generate(ids, **settings))


@pytest.mark.parametrize("has_blocks", [True, False])
def test_generates_beyond_the_trained_positions_without_a_warning(has_blocks, ids, tokenizer, caplog, monkeypatch):
    model = make("llama", tokenizer)[1 - has_blocks]
    model.config.max_position_embeddings = 80
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert ("exceeded the model" in caplog.text) != has_blocks


def test_the_tokenizer_and_the_vocabulary_stay_and_what_needs_landmarks_is_refused(ids, tokenizer, tmp_path):
    before, words = tokenizer.get_vocab(), make_model("llama").get_input_embeddings().weight
    wrapped, plain = make("llama", tokenizer)
    assert tokenizer.get_vocab() == before
    assert wrapped.get_input_embeddings().weight.shape == words.shape
    with torch.no_grad():
        assert torch.equal(wrapped(ids).logits, plain(ids).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wrapped.train()(ids, labels=ids).loss > 0  # it trains as the model does
    assert type(unwrap(wrapped)) is type(plain)
    wrapped, _ = make("llama", tokenizer)
    with pytest.raises(UserError, match="reads without landmarks"):
        wrapped(ids, phase=torch.zeros(2, dtype=torch.int64))
    read(wrapped, ids, memory := wrapped.new_memory())
    memory.save(tmp_path / "memory")
    other = wrap(make_model("llama").double(), make_tokenizer(), block_size=5)
    with pytest.raises(UserError, match="without landmarks"):
        other.new_memory().load(tmp_path / "memory")


def test_positions_beyond_those_of_the_training_are_stingy(ids, tokenizer):
    """Up to the last block before them queries read as if there were no limit, behind it blocks are brought nearer."""
    wrapped, _ = make("llama", tokenizer, FEW)
    wrapped.config.max_position_embeddings = 64
    found, true, stingy = (read(wrapped, ids, wrapped.new_memory(mapping=each)) for each in ("auto", "true", "stingy"))
    torch.testing.assert_close(found[:, :60], true[:, :60], rtol=0, atol=1e-12)
    assert ((found[:, 60:] - true[:, 60:]).abs().amax(-1) > 1e-6).all()
    assert ((found[:, 60:] - stingy[:, 60:]).abs().amax(-1) > 1e-6).all()  # what they read was read at true positions


REAL = [Path(name) for name in os.environ.get("LANDMARK_PRETRAINED", "").split(os.pathsep) if name]


@pytest.mark.skipif(not REAL, reason="LANDMARK_PRETRAINED names no folders of pretrained models")
@pytest.mark.parametrize("folder", REAL, ids=[folder.name for folder in REAL])
def test_a_pretrained_model_finds_a_pass_key(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wrap(model, tokenizer, landmarks="none", local=256, memory={"dense": 0, "k": 32})
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    text = f"{filler * 22}The pass key is 41758. Remember it. 41758 is the pass key. {filler * 58}"
    prompt = f"{text}What is the pass key? The pass key is"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert re.search(r"\d+", tokenizer.decode(found[0, ids.shape[1] :])).group() == "41758"
