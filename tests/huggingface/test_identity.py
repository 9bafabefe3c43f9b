"""A saved memory is loaded by the model that made it, and by no other: adapters, the landmark, offloaded weights."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, get_peft_model

from landmark.huggingface import load
from landmark.utils.errors import UserError
from landmark.utils.weights import weights_digest
from tests.huggingface.conftest import make_tokenizer, wrapped_model
from tests.huggingface.test_accelerate import on_disk


@torch.no_grad()
def kept(model, ids, folder):
    memory = model.new_memory()
    model(ids, past_key_values=memory)
    memory.save(folder)
    return folder


def test_another_adapter_is_another_model(llama, ids, tmp_path):
    base = kept(llama, ids, tmp_path / "base")
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["k_proj", "v_proj"]}
    adapted = get_peft_model(llama, LoraConfig(**settings), "A")
    of_a = kept(llama, ids, tmp_path / "A")
    adapted.add_adapter("B", LoraConfig(**settings))
    llama.new_memory().load(of_a)
    adapted.set_adapter("B")
    with pytest.raises(UserError, match="another model"):
        llama.new_memory().load(of_a)
    with adapted.disable_adapter():
        llama.new_memory().load(base)
        with pytest.raises(UserError, match="another model"):
            llama.new_memory().load(of_a)
    adapted.set_adapter("A")
    llama.new_memory().load(of_a)
    with pytest.raises(UserError, match="another model"):
        llama.new_memory().load(base)


def test_trained_rows_of_the_embedding_count_where_they_are_active(llama, ids, tmp_path):
    base = kept(llama, ids, tmp_path / "base")
    rows = {"embed_tokens": [llama.landmarks.token]}
    adapted = get_peft_model(llama, LoraConfig(target_modules=["q_proj"], trainable_token_indices=rows))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "trainable_tokens_delta" in name:
                weight.add_(1)
    with pytest.raises(UserError, match="another model"):
        llama.new_memory().load(base)
    with adapted.disable_adapter():
        llama.new_memory().load(base)


def test_another_row_of_the_landmark_is_another_model(llama, ids, tmp_path):
    folder = kept(llama, ids, tmp_path / "kept")
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)  # decides no keys
    llama.new_memory().load(folder)
    with torch.no_grad():
        llama.get_input_embeddings().weight[llama.landmarks.token] += 0.1
    with pytest.raises(UserError, match="another model"):
        llama.new_memory().load(folder)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_offloaded_weights_are_the_same_model(family, ids, tmp_path):
    tokenizer = make_tokenizer()
    model = wrapped_model(family, tokenizer)
    folder = kept(model, ids, tmp_path / "kept")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    found, _ = load(tmp_path / "saved", device_map=on_disk(), offload_folder=tmp_path / "offload")
    found.new_memory().load(folder)
    cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).is_meta
    model.new_memory().load(folder)
    other = wrapped_model(family, seed=1)
    dispatch_model(other, on_disk(), offload_dir=tmp_path / "other")
    assert weights_digest(other) != weights_digest(model)
    with pytest.raises(UserError, match="another model"):
        other.new_memory().load(folder)
