"""The changes of `wrap`, the models it refuses, and saving and loading."""

import copy
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, GPT2LMHeadModel, LlamaModel

from landmark.huggingface import LANDMARK, LandmarkModel, attach, load, wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import CONFIGS, SHAPE, make_model


def test_the_landmark_starts_as_the_mean_embedding(family, tokenizer):
    model = make_model(family)
    before = copy.deepcopy(model)
    wrapped = wrap(model, tokenizer)
    assert wrapped is model
    assert isinstance(wrapped, LandmarkModel)
    assert isinstance(wrapped, type(before))
    token = tokenizer.convert_tokens_to_ids(LANDMARK)
    assert token == wrapped.landmarks.token == 257
    old, new = before.get_input_embeddings().weight, wrapped.get_input_embeddings().weight
    assert torch.equal(new[:257], old)
    torch.testing.assert_close(new[257], old.mean(0))
    assert tokenizer("a<landmark>b")["input_ids"][1] == token


def test_a_row_that_is_there_already_is_used(tokenizer):
    """Vocabularies are often padded."""
    config = CONFIGS["llama"]()
    config.vocab_size = 320
    model = AutoModelForCausalLM.from_config(config)
    wrapped = wrap(model, tokenizer)
    assert len(wrapped.get_input_embeddings().weight) == 320
    weight = wrapped.get_input_embeddings().weight
    torch.testing.assert_close(weight[257], torch.cat([weight[:257], weight[258:]]).mean(0))


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_refused(scaling, tokenizer):
    parameters = {"rope_type": scaling, "factor": 2.0, "rope_theta": 1e4}
    if scaling == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    config = CONFIGS["llama"]()
    config.rope_parameters = parameters
    with pytest.raises(UserError, match=f"rope_type={scaling}"):
        wrap(AutoModelForCausalLM.from_config(config), tokenizer)


def refused(case):
    """A model that cannot have landmarks, and the expected message."""
    if case == "no rotary positions":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1))
        return model, "gpt2: has no rotary positions"
    if case == "other rotary positions":
        shape = {"vocab_size": 257, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        return AutoModelForCausalLM.from_config(CohereConfig(**shape, num_attention_heads=1)), "cohere: not one of"
    if case == "no language model":
        return LlamaModel(CONFIGS["llama"]()), "LlamaModel is not a causal language model"
    if case == "no model":
        return torch.nn.Linear(2, 2), "Linear is not a causal language model"
    config = CONFIGS["mistral" if case == "windows" else "llama"]()
    model = AutoModelForCausalLM.from_config(config)
    if case == "windows":
        model.config.sliding_window = 16
        return model, "every layer has a sliding window of 16"
    if case == "implementation":
        model.config._attn_implementation = "flex_attention"
        return model, "attn_implementation=flex_attention: load the model with one of sdpa, eager"
    model.config.attention_dropout = 0.1
    return model, "attention_dropout=0.1"


@pytest.mark.parametrize(
    "case",
    [
        *("no rotary positions", "other rotary positions", "no language model", "no model"),
        *("windows", "implementation", "dropout"),
    ],
)
def test_a_model_that_cannot_have_landmarks_is_refused(case, tokenizer):
    model, said = refused(case)
    with pytest.raises(UserError, match=re.escape(said)):
        wrap(model, tokenizer)
    assert LANDMARK not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"memory": {"k": -1}}, "retrieval.k=-1"),
        ({"memory": {"kk": 4}}, "memory has no setting kk: it has cache, "),
        ({"memory": {"gradient": True}}, "memory has no setting gradient: it has cache, "),
        ({"memory": {"fan_out": 8}}, "memory has no setting fan_out: it has cache, "),
        ({"memory": {"k": 4, "max_blocks": 2}}, "memory.blocks=2"),
        ({"memory": {"granularity": "per_layer"}}, "per_layer"),
        ({"local": 0}, "local=0"),
        ({"local": 2.5}, "local=2.5: must be a whole number"),
        ({"block_size": "63"}, "block_size='63': must be a whole number"),
        ({"memory": {"backend": "torch"}}, "memory has no setting backend"),
        ({"memory": {"blocks": 9}}, "memory has no setting blocks"),
        ({"memory": {"k": "4"}}, "retrieval.k='?4'?: must be a whole number"),
        ({"memory": {"max_blocks": 9.5}}, "memory.blocks=9.5: must be a whole number"),
        ({"memory": {"cutoff": [0.1]}}, "cutoff has 1 numbers"),
        ({"memory": {"cutoff": "low"}}, "cmt.cutoff='low'"),
        ({"memory": [("k", 4)]}, "give settings by name"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_anything_changes(settings, said, tokenizer):
    model = make_model("llama")
    with pytest.raises(UserError, match=said):
        wrap(model, tokenizer, **settings)
    assert LANDMARK not in tokenizer.get_vocab()
    assert not isinstance(model, LandmarkModel)
    assert len(model.get_input_embeddings().weight) == SHAPE["vocab_size"]


def test_a_tokenizer_with_landmarks_and_a_model_with_landmarks_are_refused(tokenizer):
    wrapped = wrap(make_model("llama"), tokenizer)
    with pytest.raises(UserError, match=r"already.*load"):
        wrap(make_model("llama"), tokenizer)
    with pytest.raises(UserError, match="landmarks already"):
        attach(wrapped)


def test_a_folder_without_landmarks_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path)
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not saved with landmarks"):
        load(tmp_path)
