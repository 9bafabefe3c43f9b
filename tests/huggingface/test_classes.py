"""The classes of models with landmarks: opened by transformers' Auto classes, pickled, on the hub."""

import copy
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from landmark.huggingface import LandmarkModel, classes, load
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model, read, wrapped_model

SETTINGS = {"memory": {"k": 2, "max_blocks": 9}}


@pytest.fixture
def folder(tokenizer, tmp_path):
    wrapped_model("llama", tokenizer, **SETTINGS).save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("gemma3", {}), ("qwen2", {"landmarks": "none"})])
def test_auto_classes_open_a_saved_model_with_its_landmarks(family, settings, ids, tokenizer, tmp_path):
    """Models of all families come back in test_families.py."""
    wrapped = wrapped_model(family, tokenizer, **settings)
    wrapped.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, its_tokenizer = load(tmp_path)
    found, expected = (model.generate(ids, max_new_tokens=8, do_sample=False) for model in (loaded, wrapped))
    assert torch.equal(found, expected)
    assert loaded.landmarks == wrapped.landmarks
    assert its_tokenizer.get_vocab().get("<landmark>") == wrapped.landmarks.token
    assert AutoConfig.from_pretrained(tmp_path).landmark == wrapped.config.landmark
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == its_tokenizer.get_vocab()
    new = AutoModelForCausalLM.from_config(wrapped.config)
    assert read(new, ids).shape == (2, 30, 257 + (settings == {}))


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
    wrapped = wrapped_model(family, tokenizer, **SETTINGS)
    if how == "torch":
        torch.save(wrapped, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    else:
        again = pickle.loads(pickle.dumps(wrapped)) if how == "pickle" else copy.deepcopy(wrapped)
    assert type(again) is type(wrapped)
    assert torch.equal(read(again, ids), read(wrapped, ids))
    assert torch.equal(*(model.generate(ids, max_new_tokens=6, do_sample=False) for model in (again, wrapped)))


def test_loads_a_name_of_the_hub(folder, ids, monkeypatch, tmp_path):
    """From the hub's own cache on disk, as it is after a download."""
    snapshot = tmp_path / "hub" / "models--someone--heron" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    refs = tmp_path / "hub" / "models--someone--heron" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, tokenizer = load("someone/heron")
    assert isinstance(model, LandmarkModel)
    assert isinstance(model, LlamaForCausalLM)
    assert tokenizer.convert_tokens_to_ids("<landmark>") == model.landmarks.token
    with pytest.raises(UserError, match="someone/egret: no such folder, and the hub did not give it"):
        load("someone/egret")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the hub."""

    class Api:
        def create_repo(self, repo_id, **_):
            (tmp_path / repo_id).mkdir(parents=True, exist_ok=True)
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **_):
            for each in operations:
                shutil.copy(each.path_or_fileobj, tmp_path / repo_id / each.path_in_repo)

    def card(repo_id, **_):
        path = tmp_path / repo_id / "README.md"
        if not path.exists():
            raise EntryNotFoundError("no README.md")
        return ModelCard(path.read_text())

    monkeypatch.setattr("transformers.utils.hub.hf_api", Api)
    monkeypatch.setattr(ModelCard, "load", card)
    return tmp_path


def test_a_model_with_landmarks_is_pushed_and_keeps_its_card(hub, ids, tokenizer):
    model = wrapped_model("llama", tokenizer)
    for each in (model, tokenizer):
        each.push_to_hub("me/mine")
    (hub / "me/mine/README.md").write_text("---\nlibrary_name: transformers\n---\n# from its record\n")
    model.push_to_hub("me/mine", tags=["long-context"])
    card = (hub / "me/mine/README.md").read_text()
    assert "# from its record" in card
    assert "long-context" in card
    again, its_tokenizer = load(hub / "me/mine")
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(again.generate(ids, **settings), model.generate(ids, **settings))
    assert its_tokenizer.convert_tokens_to_ids("<landmark>") == model.landmarks.token
    assert (hub / "me/mine/classes.py").exists(), "so that trust_remote_code opens it"
