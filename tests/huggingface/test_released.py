"""The layout of the authors' weight difference, made up at a tiny size."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from landmark.huggingface.released import recover
from landmark.memory.settings import MemorySettings
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model, make_tokenizer


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
    raw = AutoModelForCausalLM.from_pretrained(base)
    before = raw.state_dict()
    for name, tensor in weights.items():
        if tensor.shape == before[name].shape:
            difference = tensor - before[name]
        else:
            difference = tensor - torch.cat([before[name], before[name].mean(0, keepdim=True).expand(2, -1)])
        tuned.state_dict()[name].copy_(difference)
    tuned.save_pretrained(diff)
    tokenizer.save_pretrained(diff)
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
    (diff / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(UserError, match="is a file missing"):
        recover(base, diff)
    (diff / "pytorch_model-00001-of-00002.bin").write_bytes(b"cut short")
    with pytest.raises(UserError, match="is damaged"):
        recover(base, diff)
    (diff / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        recover(base, diff)


def test_folders_that_do_not_fit_are_refused(released, tmp_path):
    base, diff, _ = released
    with pytest.raises(UserError, match=r"add up to .*, not to 1\.5"):
        recover(base, diff, check_sum=1.5)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        recover(tmp_path / "nowhere", diff)
    make_model("qwen3").save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="another model"):
        recover(tmp_path / "other", diff)
    (diff / "tokenizer.json").unlink()
    (diff / "tokenizer_config.json").unlink()
    make_tokenizer().save_pretrained(diff)
    with pytest.raises(UserError, match="has no <landmark>"):
        recover(base, diff)
