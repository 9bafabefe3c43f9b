"""The classes of models with landmarks: opened by transformers' Auto classes, pickled, named on the hub."""

import copy
import io
import json
import pickle

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from landmark.huggingface import classes, load, unwrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model, read, wrapped_model

SETTINGS = {"memory": {"k": 2, "max_blocks": 9}}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("gemma3", {}), ("qwen2", {"landmarks": "none"})])
def test_auto_classes_open_a_saved_model_with_its_landmarks(family, settings, ids, tokenizer, tmp_path):
    """Models of all families come back in test_families.py. Other libraries know a model by its type in memory."""
    wrapped = wrapped_model(family, tokenizer, **settings)
    wrapped.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    loaded, its_tokenizer = load(tmp_path)
    found, expected = (model.generate(ids, **GREEDY) for model in (loaded, wrapped))
    assert torch.equal(found, expected)
    assert loaded.landmarks == wrapped.landmarks
    assert its_tokenizer.get_vocab().get("<landmark>") == wrapped.landmarks.token
    assert AutoConfig.from_pretrained(tmp_path).landmark == wrapped.config.landmark
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == its_tokenizer.get_vocab()
    new = AutoModelForCausalLM.from_config(wrapped.config)
    assert read(new, ids).shape == (2, 30, 257 + (settings == {}))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert loaded.config.model_type == make_model(family).config.model_type
    assert saved["model_type"] == f"landmark_{loaded.config.model_type}"
    assert saved["architectures"] == [type(wrapped).__name__]
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModel.from_pretrained(tmp_path)
    unwrap(wrapped).save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(plain) is type(make_model(family))
    assert not hasattr(plain.config, "landmark")


def test_a_model_without_settings_is_refused():
    with pytest.raises(UserError, match="was not saved with landmarks"):
        classes.LandmarkLlamaForCausalLM(make_model("llama").config)
    with pytest.raises(AttributeError, match="LandmarkNothing"):
        classes.LandmarkNothing  # noqa: B018


@pytest.mark.parametrize(
    ("how", "family"), [("pickle", "gemma3"), ("torch", "llama"), ("copy", "llama_yarn"), ("copy", "gemma3")]
)
def test_comes_back_from_a_pickle(how, family, ids, tokenizer):
    wrapped = wrapped_model(family, tokenizer, **SETTINGS)
    if how == "torch":
        torch.save(wrapped, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    else:
        again = pickle.loads(pickle.dumps(wrapped)) if how == "pickle" else copy.deepcopy(wrapped)
    assert type(again) is type(wrapped)
    assert torch.equal(read(again, ids), read(wrapped, ids))
    assert torch.equal(*(model.generate(ids, **GREEDY) for model in (again, wrapped)))


def test_loads_a_name_of_the_hub(ids, tokenizer, monkeypatch, tmp_path):
    """From the hub's own cache on disk, as it is after a download."""
    snapshot, refs = (tmp_path / "models--someone--heron" / name for name in ("snapshots", "refs"))
    model = wrapped_model("llama", tokenizer, **SETTINGS)
    model.save_pretrained(snapshot / ("0" * 40)), tokenizer.save_pretrained(snapshot / ("0" * 40))
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded, its_tokenizer = load("someone/heron")
    assert torch.equal(read(loaded, ids), read(model, ids))
    assert its_tokenizer.convert_tokens_to_ids("<landmark>") == model.landmarks.token
    with pytest.raises(UserError, match="someone/egret: no such folder, and the hub did not give it"):
        load("someone/egret")
