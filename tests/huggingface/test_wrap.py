"""The changes of `wrap`, the models and settings it refuses, and what is undone by `unwrap`."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaModel, TorchAoConfig

from landmark.huggingface import LANDMARK, LandmarkModel, load, unwrap, wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import SHAPE, make_config, make_model, make_tokenizer, read, wrapped_model


def test_a_row_that_is_there_already_is_used_and_a_tokenizer_with_landmarks_refused(tokenizer):
    """Vocabularies are often padded."""
    wrapped = wrap(AutoModelForCausalLM.from_config(make_config("llama", vocab_size=320)), tokenizer)
    weight = wrapped.get_input_embeddings().weight
    assert len(weight) == 320
    torch.testing.assert_close(weight[257], torch.cat([weight[:257], weight[258:]]).mean(0))
    with pytest.raises(UserError, match=r"already.*load"):
        wrap(make_model("llama"), tokenizer)


def bare(family="llama", **changes):
    model = AutoModelForCausalLM.from_config(make_config(family))
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LlamaModel(make_config("llama")), "LlamaModel is not a causal language model"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not a causal language model"),
        (lambda: bare("mistral", sliding_window=16), "every layer has a sliding window of 16"),
        (lambda: bare(_attn_implementation="flex_attention"), "flex_attention: load the model with one of sdpa, eager"),
        (lambda: bare(attention_dropout=0.1), "attention_dropout=0.1"),
        (lambda: bare(rope_parameters={"rope_type": "longrope"}), "rope_type=longrope"),
        (lambda: wrapped_model("llama"), "landmarks already"),
    ],
)
def test_a_model_that_cannot_have_landmarks_is_refused(make, said, tokenizer):
    with pytest.raises(UserError, match=re.escape(said)):
        wrap(make(), tokenizer)
    assert LANDMARK not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": "63"}, "block_size='63': must be a whole number"),
        ({"local": 0}, "local=0"),
        ({"local": 2.5}, "local=2.5: must be a whole number"),
        ({"memory": [("k", 4)]}, "give settings by name"),
        ({"memory": {"k": -1}}, "retrieval.k=-1"),
        ({"memory": {"backend": "torch"}}, "memory has no setting backend"),
        ({"memory": {"cutoff": [0.1]}}, r"cmt.cutoff=\[0.1\]: must be a number"),
        ({"landmarks": "some"}, "landmarks='some': must be one of token, none"),
        ({"landmarks": "none", "memory": {"window": None, "mapping": "true"}}, "must be a number"),
        ({"landmarks": "none", "memory": {"window": -1}}, "memory.window=-1: must be at least 0"),
        ({"landmarks": "none", "memory": {"k": 4, "first": 5}}, "first=5: is more than"),
        (
            {"landmarks": "token", "memory": {"window": 9, "scorer": "mean_key", "granularity": "per_token_and_group"}},
            "memory.window=9: .* must be null",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_anything_changes(settings, said, tokenizer):
    model = make_model("llama")
    with pytest.raises(UserError, match=said):
        wrap(model, tokenizer, **settings)
    assert LANDMARK not in tokenizer.get_vocab()
    assert not isinstance(model, LandmarkModel)
    assert len(model.get_input_embeddings().weight) == SHAPE["vocab_size"]


def test_a_folder_of_any_model_reads_without_landmarks_and_one_without_a_tokenizer_not(ids, tokenizer, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"config\.json does not exist: name the folder of a model"):
        load(tmp_path)
    plain = make_model("llama")
    plain.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer that transformers can read"):
        load(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load(tmp_path)
    assert model.landmarks.token is None
    torch.testing.assert_close(read(model, ids), plain(ids).logits)


def test_a_tokenizer_with_a_hole_in_its_ids_is_refused():
    """The next id that it would give is that of its last token, whose embedding the landmark would overwrite."""
    tokenizer = make_tokenizer(hole=100, end="!")
    model = make_model("llama")
    before = model.get_input_embeddings().weight.clone()
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) == 256
    with pytest.raises(UserError, match="256 tokens with ids up to 256 and none with the id 100, so <landmark> would"):
        wrap(model, tokenizer)
    assert "<landmark>" not in tokenizer.get_vocab()
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert not hasattr(model, "landmarks")


def test_the_configuration_of_the_caller_stays_as_it_is(tokenizer):
    config = make_model("gemma3").config
    before, first = config.to_dict(), type(make_model("gemma3"))(config)
    wrapped = wrap(first, tokenizer, landmarks="none")
    assert config.to_dict() == before
    second = type(make_model("gemma3"))(config)
    assert not hasattr(second.config, "landmark")
    wrap(second, tokenizer, landmarks="none")
    assert all(module.config is wrapped.config for module in wrapped.modules() if hasattr(module, "config"))


def test_numbers_that_overflow_are_no_answer(tokenizer):
    model = wrap(make_model("llama").half(), tokenizer, landmarks="none")
    with torch.no_grad():
        model.model.norm.weight.fill_(6e4)
    with pytest.raises(UserError, match="not finite: numbers of float16 overflow"):
        model.generate(torch.arange(9)[None], max_new_tokens=3)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_a_model_with_flash_attention_reads_with_that_of_pytorch(implementation, ids, tokenizer):
    plain = make_model("llama")
    expected = plain(ids).logits
    plain.config._attn_implementation = implementation  # as where its package is installed
    model = wrap(plain, tokenizer, landmarks="none")
    assert model.config._attn_implementation == "landmark_sdpa"
    torch.testing.assert_close(read(model, ids), expected)
    assert unwrap(model).config._attn_implementation == "sdpa"


def test_a_quantised_model_reads_as_it_is(ids, tokenizer, tmp_path):
    """Its weights are read from a folder as 8-bit integers; every block is chosen, so the answers are its own."""
    quantization = pytest.importorskip("torchao.quantization")
    make_model("llama").save_pretrained(tmp_path)
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32).eval()
    before = {name: type(weight) for name, weight in plain.named_parameters()}
    expected = plain(ids).logits
    model = wrap(plain, tokenizer, block_size=4, memory={"k": 50, "window": 8, "dense": 0}, landmarks="none")
    torch.testing.assert_close(read(model, ids), expected)
    assert {name: type(weight) for name, weight in model.named_parameters()} == before
    assert any("Int8" in kind.__name__ for kind in before.values())
