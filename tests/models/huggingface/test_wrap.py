"""The changes of `wrap`, the models and settings it refuses, and what is undone by `unwrap`."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaModel, TorchAoConfig

from landmark.attention.layout import insert_landmarks
from landmark.models.huggingface import LANDMARK, LandmarkModel, attach, load, unwrap, wrap
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.weights import weights_digest
from tests.models.huggingface.conftest import (
    SETTINGS,
    SHAPE,
    make_config,
    make_model,
    make_tokenizer,
    read,
    wrapped_model,
)


def test_a_row_that_is_there_already_is_used_and_a_tokenizer_with_landmarks_refused(tokenizer):
    """Vocabularies are often padded."""
    wrapped = wrap(AutoModelForCausalLM.from_config(make_config("llama", vocab_size=320)), tokenizer)
    weight = wrapped.get_input_embeddings().weight
    assert len(weight) == 320
    torch.testing.assert_close(weight[257], torch.cat([weight[:257], weight[258:]]).mean(0))
    with pytest.raises(UserError, match=r"already.*load"):
        wrap(make_model("llama"), tokenizer)


def test_a_folder_from_when_landmarks_took_positions_is_read_so_or_refused(ids, tmp_path):
    """A sliding window showed them too then, to which a model has got used."""
    for family in ("gemma3", "llama"):
        wrapped = wrapped_model(family, tokenizer := make_tokenizer())
        wrapped.save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
        config = read_json(file := tmp_path / family / "config.json")
        assert config["landmark"].pop("landmark_positions") is False
        write_json(file, config)
    found, _ = load(tmp_path / "llama")
    assert found.landmarks.landmark_positions
    assert not torch.equal(read(found, ids), read(wrapped, ids))
    settings = replace(wrapped.landmarks, landmark_positions=True)
    paper = attach(unwrap(wrapped), settings)
    assert torch.equal(read(found, ids), read(paper, ids))
    with pytest.raises(UserError, match="fine-tune it again"):
        load(tmp_path / "gemma3")


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
        ({"landmarks": "none", "memory": {"window": None, "mapping": "true"}}, "memory.window=null: must have a value"),
        ({"landmarks": "none", "memory": {"window": -1}}, "memory.window=-1: must be at least 0"),
        ({"landmarks": "none", "memory": {"k": 4, "first": 5}}, "first=5: is more than"),
        (
            {"landmarks": "token", "memory": {"window": 9, "scorer": "mean_key", "granularity": "per_token_and_group"}},
            "memory has no setting window",
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


# ---- models that accelerate and PEFT have changed: what they read, which saved memories are theirs


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def on_disk(layers=3):
    """A device map: the layers on disk, all else on the CPU."""
    below = {f"model.layers.{layer}": "disk" for layer in range(layers)}
    return {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"} | below


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_was_dispatched_before_reads_with_landmarks(family, ids, tokenizer, tmp_path):
    """accelerate's hook is the instance's own `forward`, around that of the class before. It knows tied weights by
    their place in memory, and adding a token moves them."""
    expected = read(wrapped_model(family, tokenizer), ids)
    model = dispatch_model(make_model(family), on_disk(), offload_dir=tmp_path / "offload")
    before = model.get_input_embeddings().weight.data  # kept: else the new one might lie there
    known = [module._hf_hook.tied_params_map for module in model.modules() if hasattr(module, "_hf_hook")]
    known = [places for places in known if places]
    assert bool(known) == (family == "gemma3")
    assert all(set(places) == {before.data_ptr()} for places in known)
    assert "forward" in vars(model)
    wrapped = wrap(model, make_tokenizer(), **SETTINGS)
    assert before.data_ptr() != (now := model.get_input_embeddings().weight.data_ptr())
    assert all(set(places) == {now} for places in known)
    assert next(wrapped.model.layers[0].parameters()).is_meta
    torch.testing.assert_close(read(wrapped, ids), expected)
    assert wrapped.generate(ids, max_new_tokens=9, do_sample=False).shape == (2, 39)


def kept(model, ids, folder):
    """The folder of a memory that the model saved."""
    read(model, ids, memory := model.new_memory())
    memory.save(folder)
    return folder


@pytest.mark.parametrize(("family", "buffers"), [("llama3", False), ("llama3", True), ("gemma3", True)])
def test_a_model_in_the_cpus_memory_reads_as_before(family, buffers, ids, tokenizer, tmp_path):
    wrapped = wrapped_model(family, tokenizer)
    expected, folder = read(wrapped, ids), kept(wrapped, ids, tmp_path / "kept")
    cpu_offload(wrapped, execution_device="cpu", offload_buffers=buffers)
    assert next(wrapped.parameters()).is_meta
    torch.testing.assert_close(read(wrapped, ids), expected)
    wrapped.new_memory().load(folder)
    assert "forward" in vars(unwrap(wrapped))
    with torch.no_grad():
        assert wrapped(ids).logits.shape == (2, 30, 258)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_loads_onto_several_places(family, ids, tokenizer, tmp_path):
    wrapped = wrapped_model(family, tokenizer)
    expected, folder = read(wrapped, ids), kept(wrapped, ids, tmp_path / "kept")
    wrapped.save_pretrained(tmp_path / "saved"), tokenizer.save_pretrained(tmp_path / "saved")
    for device_map in ("auto", on_disk()):
        again, _ = load(tmp_path / "saved", device_map=device_map, offload_folder=tmp_path / "offload")
        torch.testing.assert_close(read(again, ids), expected)
        again.new_memory().load(folder)
    dispatch_model(other := wrapped_model(family, seed=1), on_disk(), offload_dir=tmp_path / "other")
    assert weights_digest(other) != weights_digest(again)
    with pytest.raises(UserError, match="another model"):
        other.new_memory().load(folder)


@pytest.mark.parametrize("landmarks", ["token", "none"])
def test_a_saved_memory_loads_where_the_layers_are(landmarks, ids, tokenizer, tmp_path, monkeypatch):
    model = wrapped_model("gemma3", tokenizer, landmarks=landmarks)
    read(model, ids, memory := model.new_memory())
    memory.save(tmp_path / "kept")
    places = {0: "meta", 1: "cpu", 2: "meta"}
    for number, place in places.items():
        model.model.layers[number].mlp._hf_hook = SimpleNamespace(execution_device=place)
    (loaded := model.new_memory()).load(tmp_path / "kept")
    assert loaded.layers[0].keys.device.type == "meta"
    for number, layer in loaded.memory.layers.items():
        tensors = layer.between.values() if landmarks == "token" else (layer.keys, layer.values)
        assert {x.device.type for x in tensors} == {places[number]}


def test_prepared_after_wrap_it_reads_with_landmarks(accelerator, ids, tokenizer):
    wrapped = wrapped_model("llama", tokenizer)
    expected = read(wrapped, ids)
    prepared = accelerator.prepare(wrapped)
    found = read(prepared, ids)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.1 * expected.norm()
    assert (wrapped(ids).logits - expected).norm() > 0.3 * expected.norm()


def test_models_that_cannot_be_changed_are_refused(accelerator, tokenizer):
    """A forward that is closed around that of the class before cannot be bound anew."""
    cpu_offload(elsewhere := make_model("llama"), execution_device="cpu")
    own = make_model("llama")
    own.forward = lambda *args, **kwargs: type(own).forward(own, *args, **kwargs)
    for model, said in (
        (elsewhere, r"embeddings are kept elsewhere .*load\(folder, device_map=…\)"),
        (accelerator.prepare(make_model("llama")), "has a forward of its own.*accelerator.prepare.*wrap it before"),
        (own, "has a forward of its own"),
    ):
        with pytest.raises(UserError, match=said):
            wrap(model, tokenizer)
    assert "<landmark>" not in tokenizer.get_vocab()
    wrapped = wrapped_model("llama", tokenizer)
    with pytest.raises(UserError, match="landmarks already"):
        attach(wrapped, wrapped.landmarks)
    wrapped.forward = wrapped.forward
    with pytest.raises(UserError, match="has a forward of its own"):
        unwrap(wrapped)


@torch.no_grad()
def test_attention_without_landmarks_and_a_layer_that_attends_on_its_own_are_noticed(ids, tokenizer):
    wrapped = wrapped_model("llama", tokenizer)
    memory = wrapped.new_memory()
    with pytest.raises(UserError, match="reached a model that does not read with landmarks"):
        wrapped.model(ids, past_key_values=memory)
    with pytest.raises(UserError, match="reached a model that does not read with landmarks"):
        make_model("llama").generate(ids, past_key_values=memory, max_new_tokens=3)
    assert memory.get_seq_length() == 0
    expected = read(wrapped, ids)
    wrapped.set_attn_implementation("sdpa")
    for call in ({"past_key_values": memory}, {"phase": torch.zeros(1, dtype=torch.int64)}):
        with pytest.raises(UserError, match=r"attn_implementation=sdpa has no landmarks: call .*'landmark_sdpa'"):
            wrapped(ids, **call)
    with pytest.raises(UserError, match="attn_implementation=sdpa"):
        wrapped.generate(ids, max_new_tokens=3)
    wrapped.set_attn_implementation("landmark_sdpa")
    assert torch.equal(read(wrapped, ids), expected)
    wrapped = wrapped_model("llama")
    attention = wrapped.model.layers[1].self_attn
    plain = make_model("llama").model.layers[1].self_attn
    attention.config = plain.config  # as libraries do that replace a layer's attention
    for call in ({"past_key_values": wrapped.new_memory()}, {"phase": torch.zeros(2, dtype=torch.int64)}):
        with pytest.raises(UserError, match=r"layers \[1\] attended without landmarks"):
            wrapped(insert_landmarks(ids, 0, 4, wrapped.landmarks.token)[0] if "phase" in call else ids, **call)


def test_another_adapter_or_row_of_the_embedding_is_another_model(llama):
    """Adapters, and rows that they train, count where they are active; the output embedding decides no keys."""
    base, rows = weights_digest(llama), {"embed_tokens": [llama.landmarks.token]}
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)
    assert weights_digest(llama) == base
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["k_proj", "v_proj"]}
    adapted = get_peft_model(llama, LoraConfig(**settings), "A")
    of_a = weights_digest(llama)
    adapted.add_adapter("B", LoraConfig(**settings))
    assert weights_digest(llama) == of_a
    adapted.set_adapter("B")
    assert len({base, of_a, weights_digest(llama)}) == 3
    with adapted.disable_adapter():
        assert weights_digest(llama) == base
    adapted.set_adapter("A")
    assert weights_digest(llama) == of_a
    llama = adapted.unload()
    adapted = get_peft_model(llama, LoraConfig(target_modules=["q_proj"], trainable_token_indices=rows))
    of_rows = weights_digest(llama)
    for name, weight in adapted.named_parameters():
        if "trainable_tokens_delta" in name:
            weight.data += 1
    assert len({base, of_rows, weights_digest(llama)}) == 3
    with adapted.disable_adapter():
        assert weights_digest(llama) == base
