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

from landmark.huggingface import LandmarkModel, load, unwrap, wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import CONFIGS, FURTHER, make_model, make_tokenizer, read

EAGER = ("gemma2", "gemma3_whole", "gpt_oss")  # families without another attention, which rounds weights to float32
ROUNDED = (*EAGER, "llama4_text")  # its router rounds too
ALL = {"k": 100, "window": 7}
FEW = {"k": 3, "window": 7, "rerank": 5}


def make(family, tokenizer, memory=ALL, **settings):
    """A model and the same without landmarks, in float64."""
    model = make_model(family, "eager" if family in EAGER else "sdpa").double()
    plain = copy.deepcopy(model)
    return wrap(model, tokenizer, landmarks="none", **{"block_size": 5, "local": 17, **settings}, memory=memory), plain


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [*CONFIGS, *FURTHER])
def test_a_model_that_reads_every_block_is_the_model_itself(name, ids, tokenizer):
    wrapped, plain = make(name, tokenizer)
    memory = wrapped.new_memory()
    found = read(wrapped, ids, memory)
    assert memory.stats["blocks_kept"] > 10
    assert memory.get_seq_length() == 90
    with torch.no_grad():
        expected = plain(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if name not in ROUNDED else 2e-5)


@pytest.mark.parametrize(
    ("mapping", "parts", "atol"),
    [("auto", 1, 1e-12), ("auto", [40, 1, 1, 48], 1e-12), ("auto", [3, 5, 82], 1e-12), ("stingy", 90, 2e-5)],
)
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_in_any_chunks_and_by_the_stingy_mapping(name, mapping, parts, atol, ids, tokenizer):
    """There the memory assigns positions, and the model's own angles are float32."""
    wrapped, plain = make(name, tokenizer, {**ALL, "mapping": mapping})
    with torch.no_grad():
        expected = plain(ids).logits
    torch.testing.assert_close(read(wrapped, ids, parts=parts), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generates_what_the_model_generates(name, settings, ids, tokenizer):
    wrapped, plain = make(name, tokenizer)
    settings = {"max_new_tokens": 23, "do_sample": False, **settings}
    assert torch.equal(wrapped.generate(ids, **settings), plain.generate(ids, **settings))


def test_few_blocks_are_the_models_attention_to_fewer_keys(ids, tokenizer):
    """Read token by token, with the keys of each query chosen by hand: the blocks with the best mean keys."""
    block, window, k = 5, 7, 3
    wrapped, plain = make(
        "llama", tokenizer, {**FEW, "rerank": None, "window": window, "granularity": "per_token_and_head"}
    )
    found = read(wrapped, ids[:1, :50], parts=[1] * 50)
    expected = by_hand(plain, ids[:1, :50], block, window, k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - wrapped(ids[:1, :50]).logits).abs().max() > 0.01


def by_hand(model, ids, block, window, k):
    """Logits of a model whose queries see the last tokens and k blocks, the first one among them."""
    from transformers import AttentionInterface

    def attention(module, q, keys, values, mask, scaling, **_):
        groups = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1)[0] for x in (keys, values))
        out = torch.zeros_like(q)
        for head in range(q.shape[1]):
            key_means = keys[head].unflatten(0, (-1, block)).mean(1)
            for query in range(ids.shape[1]):
                stored = max(0, query - window) // block  # before this token
                means = (key_means @ q[0, head, query])[:stored]
                best = means.argsort(descending=True).tolist()
                blocks = [0, *[n for n in best if n][: k - 1]] if stored else []
                near = [*range(stored * block, query + 1)]
                tokens = [n * block + i for n in blocks for i in range(block)] + near
                scores = keys[head, tokens] @ q[0, head, query] * scaling
                out[0, head, query] = scores.softmax(-1) @ values[head, tokens]
        return out.transpose(1, 2), None

    AttentionInterface.register("by_hand", attention)
    model.set_attn_implementation("by_hand")
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("mapping", ["true", "stingy"])
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_where_blocks_are_stored_makes_no_difference(tier, mapping, ids, tokenizer):
    wrapped, _ = make("gemma3", tokenizer, {**FEW, "mapping": mapping})
    memory = wrapped.new_memory(tier=tier, cache=4)
    assert torch.equal(read(wrapped, ids, memory), read(wrapped, ids))


@pytest.mark.parametrize("mapping", ["auto", "stingy"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_saved_memory_goes_on(name, mapping, ids, tokenizer, tmp_path):
    wrapped, _ = make(name, tokenizer, {**FEW, "mapping": mapping})
    memory, again = wrapped.new_memory(), wrapped.new_memory(tier="disk")
    read(wrapped, ids[:, :60], memory, [60])
    memory.save(tmp_path / "memory")
    again.load(tmp_path / "memory")
    found, expected = (read(wrapped, ids[:, 60:], each, [30]) for each in (again, memory))
    assert torch.equal(found, expected)


def test_the_tokenizer_and_the_vocabulary_stay_as_they_are(ids, tokenizer):
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


def test_comes_back_from_disk(ids, tokenizer, tmp_path):
    wrapped, _ = make("qwen2", tokenizer, FEW)
    wrapped.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path, dtype=torch.float64)
    assert isinstance(again, LandmarkModel)
    assert again.landmarks == wrapped.landmarks
    torch.testing.assert_close(read(again, ids), read(wrapped, ids), rtol=0, atol=1e-12)


def test_positions_beyond_those_of_the_training_are_stingy(ids, tokenizer):
    """Where it is known before anything is read; else a warning says so."""
    wrapped, _ = make("llama", tokenizer, FEW)
    wrapped.config.max_position_embeddings = 80
    expected = read(wrapped, ids, wrapped.new_memory(mapping="stingy"))
    memory = wrapped.new_memory()
    assert torch.equal(read(wrapped, ids, memory), expected)
    memory.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(wrapped, ids[:, :80], memory, [50, 30])
    assert torch.equal(found, read(wrapped, ids[:, :80], wrapped.new_memory(mapping="true"), [50, 30]))
    with pytest.warns(UserWarning, match="beyond the 80 positions"):
        read(wrapped, ids[:, 80:], memory, [10])
    memory.reset()
    memory.expect(90)
    assert torch.equal(read(wrapped, ids, memory, [51, 39]), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # without and with sliding windows
def test_texts_of_a_padded_batch_are_placed_each_as_if_alone(name, ids, tokenizer):
    """One goes beyond the positions of the training, the others do not."""
    wrapped, _ = make(name, tokenizer, FEW)
    wrapped.config.max_position_embeddings = 80
    batch, mask = ids[[0, 1, 0]], torch.ones(3, ids.shape[1], dtype=torch.long)
    mask[0, :31], mask[2, :17] = 0, 0
    with torch.no_grad():
        memory = wrapped.new_memory()
        first = wrapped(batch, attention_mask=mask, past_key_values=memory).logits
        more = wrapped(batch[:, :5], attention_mask=mask.new_ones(3, 95), past_key_values=memory).logits
    for row, own in enumerate(mask.bool()):
        alone = wrapped.new_memory()
        parts = (batch[row][own], batch[row, :5])
        found = torch.cat([read(wrapped, x[None], alone, [len(x)]) for x in parts], 1)
        expected = torch.cat([first[row, own], more[row]])
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)


def test_generates_beyond_the_positions_of_the_training_without_a_warning(ids, tokenizer, caplog, monkeypatch):
    wrapped, plain = make("llama", tokenizer)
    wrapped.config.max_position_embeddings = plain.config.max_position_embeddings = 80
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    found = []
    for model in (wrapped, plain):
        caplog.clear()
        model.generate(ids, max_new_tokens=3, do_sample=False)
        found.append("exceeded the model" in caplog.text)
    assert found == [False, True]


def test_generation_announces_its_tokens(ids, tokenizer):
    """A text that goes beyond the positions of the training while it is generated is stingy from its beginning."""
    wrapped, _ = make("llama", tokenizer, FEW)
    wrapped.config.max_position_embeddings = 95
    memory = wrapped.new_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = wrapped.generate(ids, past_key_values=memory, max_new_tokens=20, do_sample=False)
    stingy = wrapped.new_memory(mapping="stingy")
    assert torch.equal(found, wrapped.generate(ids, past_key_values=stingy, max_new_tokens=20, do_sample=False))
    read(wrapped, ids, true := wrapped.new_memory())
    assert memory.memory.positions.name == "stingy" != true.memory.positions.name


def test_what_needs_landmarks_is_refused(ids, tokenizer, tmp_path):
    wrapped, _ = make("llama", tokenizer)
    with pytest.raises(UserError, match="reads without landmarks"):
        wrapped(ids, phase=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match="has no landmarks"):
        wrapped.new_memory(window=None, scorer="landmark", rerank=None, mapping="true")
    read(wrapped, ids, memory := wrapped.new_memory())
    memory.save(tmp_path / "memory")
    other = wrap(make_model("llama").double(), make_tokenizer(), block_size=5)
    with pytest.raises(UserError, match="model.landmark_key=none"):
        other.new_memory(mapping="true").load(tmp_path / "memory")


REAL = [Path(name) for name in os.environ.get("LANDMARK_PRETRAINED", "").split(os.pathsep) if name]


@pytest.mark.skipif(not REAL, reason="LANDMARK_PRETRAINED names no folders of pretrained models")
@pytest.mark.parametrize("folder", REAL, ids=[folder.name for folder in REAL])
def test_a_pretrained_model_finds_a_pass_key(folder):
    """Of 2048 tokens, from blocks that lie further back than the last tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wrap(model, tokenizer, landmarks="none", local=256)
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    text = f"{filler * 22}The pass key is 41758. Remember it. 41758 is the pass key. {filler * 58}"
    prompt = f"{text}What is the pass key? The pass key is"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert re.search(r"\d+", tokenizer.decode(found[0, ids.shape[1] :])).group() == "41758"
