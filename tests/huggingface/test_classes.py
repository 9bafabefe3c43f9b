"""The classes of models with landmarks: opened by transformers' Auto classes, pickled, sent to workers, unwrapped."""

import copy
import io
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from landmark.huggingface import LandmarkModel, attach, classes, load, unwrap, wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model

SETTINGS = {"block_size": 4, "memory": {"k": 2, "max_blocks": 9}, "local": 9}


@pytest.fixture
def ids():
    return torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tokenizer, tmp_path):
    wrap(make_model("llama"), tokenizer, **SETTINGS).save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@torch.no_grad()
def read(model, ids):
    return model(ids, past_key_values=model.new_memory()).logits


def test_auto_classes_open_a_saved_model_with_its_landmarks(family, ids, tokenizer, tmp_path):
    wrapped = wrap(make_model(family), tokenizer, **SETTINGS)
    wrapped.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LandmarkModel)
    assert type(again) is type(wrapped)
    assert again.landmarks == wrapped.landmarks
    assert torch.equal(read(again, ids), read(wrapped, ids))
    loaded, its_tokenizer = load(tmp_path)
    found, expected = (model.generate(ids, max_new_tokens=8, do_sample=False) for model in (loaded, wrapped))
    assert torch.equal(found, expected)
    assert its_tokenizer.convert_tokens_to_ids("<landmark>") == wrapped.landmarks.token
    assert AutoConfig.from_pretrained(tmp_path).landmark == wrapped.config.landmark
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<landmark>") == 257
    new = AutoModelForCausalLM.from_config(wrapped.config)
    assert read(new, ids).shape == (1, 40, 258)


def in_a_new_process(code, folder, **environment):
    """Standard output and error of a program that sees neither the package nor this folder, unless PYTHONPATH does."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    given |= {"HF_MODULES_CACHE": str(folder / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=given, capture_output=True, text=True, timeout=240
    )


def test_code_in_the_folder_opens_it_where_the_package_is_installed_and_nothing_else_does(folder, ids):
    """As from the hub: the package is not imported before; at first it is missing. A pickle is opened there too."""
    package = os.path.dirname(os.path.dirname(sys.modules["landmark"].__file__))
    code = """
import sys
sys.modules["landmark"] = None
from transformers import AutoModelForCausalLM
for trust in (True, False, None):
    try:
        print(AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=trust))
    except Exception as error:
        print(trust, type(error).__name__, " ".join(str(error).split()))
del sys.modules["landmark"]
print("opened", type(AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)).__mro__)
import pickle, torch
ids = torch.load("ids")
model = pickle.load(open("pickle", "rb"))
torch.save(model(ids, past_key_values=model.new_memory()).logits.detach(), "logits")
"""
    model = load(folder)[0]
    (folder.parent / "pickle").write_bytes(pickle.dumps(model))
    torch.save(ids, folder.parent / "ids")
    done = in_a_new_process(code, folder.parent, PYTHONPATH=package)
    said, opened = done.stdout.split("opened")  # with transformers' own question, where nothing is said
    assert "True ImportError this model reads with landmarks: install the package `landmark`" in said
    assert "False ValueError The repository saved contains custom code" in said
    assert "None ValueError The repository saved contains custom code" in said
    assert "ForCausalLM(" not in said
    assert "LandmarkLlamaForCausalLM" in opened, done.stderr
    assert "LandmarkModel" in opened
    torch.testing.assert_close(torch.load(folder.parent / "logits"), read(model, ids))


def test_what_a_configuration_says_in_memory_and_on_disk(folder, tokenizer):
    """Other libraries know a model by the type of its configuration in memory, as PEFT does for its adapters."""
    model, _ = load(folder)
    assert model.config.model_type == "llama"
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model_type"] == "landmark_llama"
    assert saved["architectures"] == ["LandmarkLlamaForCausalLM"]
    assert saved["auto_map"]["AutoModelForCausalLM"] == "classes.LandmarkLlamaForCausalLM"
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    assert any("q_proj.lora_A" in name for name, _ in adapted.named_parameters())
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModel.from_pretrained(folder)


def test_a_model_without_settings_is_refused():
    with pytest.raises(UserError, match="was not saved with landmarks"):
        classes.LandmarkLlamaForCausalLM(make_model("llama").config)
    with pytest.raises(AttributeError, match="LandmarkNothing"):
        classes.LandmarkNothing  # noqa: B018


@pytest.mark.parametrize(
    ("how", "family"), [("pickle", "gemma3"), ("torch", "llama"), ("copy", "llama_yarn"), ("copy", "gemma3")]
)
def test_comes_back_from_a_pickle(how, family, ids, tokenizer):
    wrapped = wrap(make_model(family), tokenizer, **SETTINGS)
    if how == "torch":
        torch.save(wrapped, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    else:
        again = pickle.loads(pickle.dumps(wrapped)) if how == "pickle" else copy.deepcopy(wrapped)
    assert type(again) is type(wrapped)
    assert torch.equal(read(again, ids), read(wrapped, ids))
    assert torch.equal(*(model.generate(ids, max_new_tokens=6, do_sample=False) for model in (again, wrapped)))


@torch.no_grad()
def test_unwrapped_it_is_the_model_of_before(family, ids, tokenizer, tmp_path):
    model = make_model(family)
    before = copy.deepcopy(model)
    wrapped = wrap(model, tokenizer, **SETTINGS)
    settings = wrapped.landmarks
    with_landmarks = read(wrapped, ids)
    plain = unwrap(wrapped)
    assert plain is model
    assert type(plain) is type(before)
    assert type(plain.config) is type(before.config)
    assert plain.config._attn_implementation == "sdpa"
    assert torch.equal(plain(ids).logits[..., :257], before(ids).logits)
    plain.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(before)
    assert not hasattr(again.config, "landmark")
    with pytest.raises(UserError, match="has no landmarks to take off"):
        unwrap(plain)
    assert torch.equal(read(attach(plain, settings), ids), with_landmarks)


def test_loads_a_name_of_the_hub(folder, ids, monkeypatch, tmp_path):
    """From the hub's own cache on disk, as it is after a download."""
    snapshot = tmp_path / "hub" / "models--someone--heron" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    refs = tmp_path / "hub" / "models--someone--heron" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, tokenizer = load("someone/heron")
    assert isinstance(model, LandmarkModel)
    assert isinstance(model, LlamaForCausalLM)
    assert tokenizer.convert_tokens_to_ids("<landmark>") == model.landmarks.token
    with pytest.raises(UserError, match="someone/egret: no such folder, and the hub did not give it"):
        load("someone/egret")
