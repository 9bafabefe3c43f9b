"""Models in .gguf files: of each family, with each key, with bad content, and what is done with them afterwards."""

import copy
import logging
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the optional extra `gguf` is not installed")

import gguf
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from landmark.experiment.data.tokenizers import open_pretrained
from landmark.models.config import DecoderConfig, Landmarks
from landmark.models.gguf.file import GGUF, opened
from landmark.models.gguf.linear import Quantized, tile_rows
from landmark.models.gguf.opening import is_quantised, open_gguf
from landmark.models.huggingface import load, wrap
from landmark.models.pretrained import load_pretrained, size_of, start_from, weights_sha256
from landmark.utils.errors import UserError
from landmark.utils.weights import weights_digest
from tests.models.gguf.writing import CASES, TOKENS, YARN, make_model, write

IDS = torch.arange(3, 83)[None]
MIXED = {"ffn_down": "Q6_K", "ffn": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_q": "Q5_K"}
packs = pytest.mark.skipif(tile_rows() is None, reason="this processor has no product of packed integers")


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits.float()


def divisors(model):
    """What llama.cpp writes for a rotation as Llama 3's: the numbers that divide the frequencies."""
    rope, dims = model.config.rope_parameters, model.config.head_dim
    if rope.get("rope_type") != "llama3":
        return {}
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, dims, 2).float() / dims)
    return {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).numpy()}


def mixed(name: str) -> str:
    """The types of a file of four bits, side by side."""
    return next((kind for part, kind in MIXED.items() if part in name), "Q5_1")


@pytest.fixture
def written(tmp_path):
    """A file of all types, and the model with its weights."""
    model = make_model("llama", hidden_size=256, intermediate_size=512, attention_bias=False)
    return write(tmp_path / "mixed.gguf", "llama", model, mixed), model


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_each_family_comes_out_as_it_was_written(case, tmp_path):
    """In 80 tokens, beyond windows and the lengths that rotations are scaled from."""
    model = make_model(case)
    tensors = divisors(model) if "llama" in case else {}
    found = open_gguf(write(tmp_path / "tiny.gguf", case, model, tensors=tensors), torch.float32)
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=2e-5)
    assert found.config.to_dict().keys() >= {"vocab_size"}


@packs
@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3", "qwen3_moe", "mixtral"])
def test_integers_stay_and_logits_are_those_of_the_weights(case, tmp_path):
    """Those of each expert too; the head of a tied model is that of its embedding."""
    model = make_model(case, hidden_size=256, intermediate_size=512)
    file = write(tmp_path / "tiny.gguf", case, model, lambda name: "Q5_1" if "down_exps" in name else mixed(name))
    exact = logits(model)
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    plain.load_state_dict(model.state_dict())
    found = open_gguf(file, torch.bfloat16)
    kept = [each for each in found.modules() if isinstance(each, Quantized)]
    experts = getattr(model.config, "num_experts", getattr(model.config, "num_local_experts", 1))
    assert len(kept) == 2 + model.config.num_hidden_layers * (4 + 3 * experts)
    for ids in (IDS, IDS[:, :1]):
        expected = exact[:, : ids.shape[1]]
        errors = [(logits(each, ids) - expected).norm() / expected.norm() for each in (found, plain)]
        assert errors[0] < 2 * errors[1] + 0.01
    copied, saved = copy.deepcopy(found), found.state_dict()
    assert torch.equal(logits(copied), logits(found))
    assert model.state_dict().keys() - saved.keys() <= {"lm_head.weight"}
    for name, weight in saved.items():
        torch.testing.assert_close(weight, model.state_dict()[name].bfloat16())


def test_a_processor_that_is_not_known_reads_a_file_with_its_weights_expanded(tmp_path, monkeypatch):
    """As one of ARM, for which no integers are packed."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    tile_rows.cache_clear()
    try:
        model = make_model("qwen2", hidden_size=256, intermediate_size=512)
        found, tokenizer = load(write(tmp_path / "tiny.gguf", "qwen2", model, mixed))
        assert not is_quantised(found)
        expected = logits(model)
        with torch.no_grad():
            read = found(IDS, past_key_values=found.new_memory(k=64)).logits.float()
        assert (read - expected).norm() / expected.norm() < 0.05
        found.save_pretrained(tmp_path / "folder"), tokenizer.save_pretrained(tmp_path / "folder")
        with pytest.raises(UserError, match="is for model.dtype=bfloat16 on a CPU with AVX2 or AVX-512"):
            load(tmp_path / "folder", bits=4)
    finally:
        tile_rows.cache_clear()


@packs
def test_one_line_says_what_weights_take(written, caplog):
    with caplog.at_level(logging.INFO, logger="landmark"):
        open_gguf(written[0], torch.bfloat16)
    assert len(caplog.messages) == 1
    for form in ("left in the file", "of four bits", "of twice four bits", "expanded"):
        assert form in caplog.text


def test_keys_that_change_nothing_or_say_it_twice_are_taken(tmp_path):
    model = make_model("gemma3")
    pattern = [(number + 1) % 6 != 0 for number in range(7)]
    keys = {"gemma3.attention.sliding_window_pattern": pattern, "gemma3.rope.freq_base_swa": 1e4}
    keys |= {"gemma3.vocab_size": len(TOKENS), "gemma3.expert_count": 0, "gemma3.attn_logit_softcapping": 0.0}
    found = open_gguf(write(tmp_path / "a.gguf", "gemma3", model, keys=keys), torch.float32)
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=2e-5)
    keys["gemma3.attention.sliding_window_pattern"] = pattern[::-1]
    other = open_gguf(write(tmp_path / "b.gguf", "gemma3", make_model("gemma3"), keys=keys), torch.float32)
    assert (logits(other) - logits(model)).abs().max() > 1e-3


def test_yarn_with_its_own_numbers(tmp_path):
    changed = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5 * (0.1 * float(np.log(4)) + 1)}
    model = make_model("qwen2_yarn", rope_parameters=changed)
    keys = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "attn_factor": 1.5}
    keys = {f"qwen2.rope.scaling.{name}": value for name, value in keys.items()}
    found = open_gguf(write(tmp_path / "a.gguf", "qwen2_yarn", model, keys=keys), torch.float32)
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=2e-5)
    assert found.config.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type=longrope: read are none"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "original_context_length is missing"),
        ({"llama.attention.sliding_window": 12}, "llama.attention.sliding_window=12: it may change"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale=2.0"),
        ({"llama.attn_logit_softcapping": 5.0}, "llama.attn_logit_softcapping=5.0"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8: keys have 32"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "expert_used_count=5: there are 4 experts"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8: heads have 32"),
        ({"llama.feed_forward_length": [96, 48]}, r"llama.feed_forward_length=\[96, 48\]: one number"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, "tensor blk.2.* is missing"),
        ({"llama.block_count": 1}, "tensor blk.1.* is not known to models of llama"),
        ({"llama.embedding_length": 32}, "has the shape .* for which its keys ask"),
        ({"llama.vocab_size": 99}, "vocab_size are 99, but token_embd.weight has"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model=bert: read are"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new"}, "tokenizer.ggml.pre=new: how it splits"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id=999: there is no such token"),
        ({"general.architecture": "mamba"}, "general.architecture=mamba: such .gguf files are not read"),
        ({"general.type": "mmproj"}, "is no language model, but a mmproj"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(keys, said, tmp_path):
    file = write(tmp_path / "a.gguf", "llama", make_model("llama"), keys=keys)
    with pytest.raises(UserError, match=said) as error:
        load(file)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("shape", [(3, 512, 256), (4, 256, 512), (5, 512, 256)])
def test_experts_of_another_shape_are_named(shape, tmp_path):
    """Those of fewer experts, too: else the bytes behind them would be taken for the last one."""
    model = make_model("mixtral", hidden_size=256, intermediate_size=512)
    file = write(tmp_path / "a.gguf", "mixtral", model, "Q8_0")
    tensors = opened(file).tensors
    tensors["blk.1.ffn_up_exps.weight"] = replace(tensors["blk.1.ffn_up_exps.weight"], shape=shape)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(UserError, match="blk.1.ffn_up_exps.weight has the shape"):
            open_gguf(file, dtype)


def test_damaged_files_are_refused_in_one_line_wherever_they_are_cut(written):
    file, whole = written[0], written[0].read_bytes()
    start = min(tensor.offset for tensor in opened(file).tensors.values())
    for length in [0, 3, 4, 20, 30, *range(40, start, start // 40), start + 1, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged|cut short|no .gguf|not read") as error:
            load(file)
        assert "\n" not in str(error.value)
    for place in range(4, start, 97):  # edited: it opens, or one line says why not
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(UserError):
            opened(file)


def test_types_that_are_not_read_and_projectors_are_named(tmp_path):
    for name, kind in {"blk.0.ffn_up.weight": "IQ4_XS", "output.weight": "Q3_K"}.items():
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        writer = gguf.GGUFWriter(file := tmp_path / f"{kind}.gguf", "llama")
        writer.add_tensor(name, np.zeros((4, size), np.uint8), raw_dtype=gguf.GGMLQuantizationType[kind])
        _finish(writer)
        with pytest.raises(UserError, match=f"tensor {name} is of type {kind}, which is not read; read are F32"):
            load(file)
    _finish(gguf.GGUFWriter(file := tmp_path / "mmproj.gguf", "clip"))
    with pytest.raises(UserError, match="is no language model, but a vision projector"):
        load(file)


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_split_file_needs_all_its_parts(tmp_path):
    model = make_model("qwen2")
    write(tmp_path / "tiny.gguf", "qwen2", model, parts=2)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    for part in (parts[0], parts[2]):
        torch.testing.assert_close(logits(open_gguf(part, torch.float32)), logits(model), rtol=0, atol=2e-5)
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{parts[1].name} is missing beside it"):
        GGUF(parts[0])
    parts[0].rename(tmp_path / "part.gguf")
    with pytest.raises(UserError, match="is a part of"):
        load(tmp_path / "part.gguf")


@packs
def test_a_wrapped_model_reads_saves_and_is_known_by_its_file(written, tmp_path):
    file, original = written
    model, tokenizer = load(file)
    assert is_quantised(model)
    assert model.landmarks.token is None
    assert tokenizer("ab")["input_ids"][0] == 1
    again, _ = load(file)
    assert weights_digest(model) == weights_digest(again)
    with pytest.raises(UserError, match="no embedding can be added"):
        wrap(open_gguf(file, torch.bfloat16), tokenizer)
    for modules in ("all-linear", ["q_proj"]):
        with pytest.raises(ValueError, match="target_modules|is not supported"):
            get_peft_model(model, LoraConfig(target_modules=modules))
    model.save_pretrained(tmp_path / "saved"), tokenizer.save_pretrained(tmp_path / "saved")
    saved, its_tokenizer = load(tmp_path / "saved")
    assert not is_quantised(saved)
    weights = original.state_dict()
    assert saved.state_dict().keys() == weights.keys()
    assert all(torch.equal(each, weights[name].bfloat16()) for name, each in saved.state_dict().items())
    assert its_tokenizer("ab c") == tokenizer("ab c")
    before, place = weights_digest(again), opened(file).tensors["blk.0.attn_q.weight"].offset + 100
    content = file.read_bytes()
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert weights_digest(load(file)[0]) != before


def test_models_of_runs_come_from_a_file(written):
    """Training takes the weights in float32, with adapters or without; a reading model takes blocks."""
    file, original = written
    total, body, shape = size_of(str(file))
    assert total == sum(each.numel() for each in original.parameters())
    assert total - body == 2 * original.lm_head.weight.numel()
    tuned = start_from(str(file), shape, lora_rank=2)
    torch.testing.assert_close(logits(tuned.model), logits(original), rtol=0, atol=2e-5)
    plain = start_from(str(file), shape)
    assert all(each.requires_grad and each.dtype == torch.float32 for each in plain.parameters())
    reads = load_pretrained(file, DecoderConfig(**vars(shape) | {"landmarks": Landmarks(None, 8)}), torch.float32)
    assert reads.config.block_size == 8
    before = weights_sha256(str(file))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert weights_sha256(str(file)) != before


def test_the_tokenizer_begins_ends_and_splits_as_the_file_says(tmp_path):
    model = make_model("llama")
    keys = {"tokenizer.ggml.eot_token_id": 261, "tokenizer.chat_template": "{{ messages }}"}
    keys |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    file = write(tmp_path / "a.gguf", "llama", model, keys=keys)
    found, tokenizer = load(file)
    assert found.generation_config.eos_token_id == [2, 261, 260]
    assert tokenizer.chat_template == "{{ messages }}"
    assert not any(isinstance(value, list) and len(value) > 256 for value in opened(file).keys.values())
    assert tokenizer("a")["input_ids"] == [3 + ord("a")]
    assert tokenizer("<|im_end|>")["input_ids"] == [260]
    assert open_pretrained(file).encode("a b").tolist() == [3 + ord("a"), 259, 3 + ord("b")]
    found, tokenizer = load(write(tmp_path / "b.gguf", "llama", model))
    assert tokenizer("a")["input_ids"] == [1, 259, 3 + ord("a")]
    assert found.generation_config.eos_token_id == [2, 260]
