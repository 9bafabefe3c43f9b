"""The layout of the authors' weight difference, made up at a tiny size."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from landmark.huggingface.released import recover
from landmark.memory.settings import MemorySettings
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model, make_tokenizer, save_model


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
