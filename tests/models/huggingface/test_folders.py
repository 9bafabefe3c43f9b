"""Folders and files that hold a model: of transformers' Auto classes, a pickle, the hub, the authors."""

import copy
import io
import json
import pickle

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from landmark.memory.landmarks.settings import MemorySettings
from landmark.models.huggingface import classes, load, unwrap
from landmark.models.huggingface.folders import folder_of
from landmark.models.huggingface.released import recover
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import make_model, make_tokenizer, read, save_model, wrapped_model

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


def test_of_the_hub_templates_come_along_and_no_weights_twice(monkeypatch, tmp_path):
    """A template is a file of its own since transformers 5; some models have a second copy in another format."""
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **given: asked.update(given) or tmp_path)
    assert folder_of("someone/heron") == tmp_path
    files = ["config.json", "chat_template.jinja", "model-00001-of-00002.safetensors", "tokenizer.model"]
    others = ["original/model.safetensors", "original/params.json", "consolidated.safetensors", "pytorch_model.bin"]
    assert list(filter_repo_objects([*files, *others], **asked)) == files


# ---- the layout of the authors' weight difference, made up at a tiny size


@pytest.fixture
def released(tmp_path):
    """LLaMA's folder, and a function that writes the difference to a fine-tuned model; and that model's weights."""
    base, diff = tmp_path / "base", tmp_path / "diff"
    make_model("llama").save_pretrained(base)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<landmark>"], special_tokens=True)
    tuned = make_model("llama", seed=1)
    tuned.resize_token_embeddings(259, mean_resizing=False)
    weights = {name: tensor.detach().clone() for name, tensor in tuned.state_dict().items()}
    for name, before in AutoModelForCausalLM.from_pretrained(base).state_dict().items():
        further = before.mean(0, keepdim=True).expand(len(weights[name]) - len(before), *before.shape[1:])
        tuned.state_dict()[name].sub_(torch.cat([before, further]))
    save_model(diff, tuned, tokenizer)
    return base, diff, weights


def test_the_authors_model_is_recovered(released):
    base, diff, weights = released
    total = float(sum(tensor.sum() for tensor in weights.values()))
    model, tokenizer = recover(base, diff, check_sum=total, k=3)
    assert tokenizer.convert_tokens_to_ids("<landmark>") == model.landmarks.token == 258
    assert (model.landmarks.block_size, model.landmarks.memory) == (50, MemorySettings(k=3))
    found = model.state_dict()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    ids = torch.tensor([tokenizer("Where is the heron?")["input_ids"]])
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)


def test_files_and_settings_of_their_time_are_read(released):
    """Shards of pickled tensors, frequencies among them, and a kind of model that transformers does not know."""
    base, diff, weights = released
    tensors = dict(AutoModelForCausalLM.from_pretrained(diff).state_dict())
    (diff / "model.safetensors").unlink()
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[:9]} | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)
    }
    torch.save(first, diff / "pytorch_model-00001-of-00002.bin")
    torch.save({name: tensors[name] for name in names[9:]}, diff / "pytorch_model-00002-of-00002.bin")
    config = json.loads((diff / "config.json").read_text())
    config |= {"model_type": "llama_with_landmark", "mem_id": 258, "mem_freq": 63}
    (diff / "config.json").write_text(json.dumps(config))
    model, _ = recover(base, diff)
    assert model.landmarks.block_size == 63
    for name, tensor in weights.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    one, two = sorted(diff.glob("pytorch_model-*.bin"))
    for change, said in (
        (two.unlink, "is a file missing"),
        (lambda: one.write_bytes(b"cut short"), "is damaged"),
        (one.unlink, "holds no weights"),
    ):
        change()
        with pytest.raises(UserError, match=said):
            recover(base, diff)


def test_folders_that_do_not_fit_are_refused(released, tmp_path):
    base, diff, _ = released
    make_model("qwen3").save_pretrained(tmp_path / "other")
    for folder, check_sum, said in (
        (base, 1.5, r"add up to .*, not to 1\.5"),
        (tmp_path / "nowhere", None, r"holds no config\.json"),
        (tmp_path / "other", None, "another model"),
    ):
        with pytest.raises(UserError, match=said):
            recover(folder, diff, check_sum=check_sum)
    (diff / "tokenizer.json").unlink()
    (diff / "tokenizer_config.json").unlink()
    make_tokenizer().save_pretrained(diff)
    with pytest.raises(UserError, match="has no <landmark>"):
        recover(base, diff)
