"""A folder whose weights are made integers of four or eight bits when it is opened."""

import copy
import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the optional extra `gguf` is not installed")

import gguf

from landmark.models.gguf.linear import QuantizedLinear, expanded, tile_rows
from landmark.models.gguf.quantising import MAKERS, quantise
from landmark.models.huggingface import load, wrap
from landmark.models.huggingface.safe_loading import open_model
from landmark.utils.errors import UserError
from landmark.utils.weights import weights_digest
from tests.models.gguf.writing import make_model
from tests.models.huggingface.conftest import save_model

pytestmark = pytest.mark.skipif(tile_rows() is None, reason="this processor has no product of packed integers")
IDS = torch.arange(3, 83)[None]


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits.float()


@pytest.mark.parametrize(("kind", "least"), [("Q4_1", 0.6), ("Q8_0", 0.98)])
def test_blocks_are_those_of_the_format_and_nearer_than_the_packages_own(kind, least):
    weights = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    weights[3, 32:64], weights[4] = 0.0, 0.25  # of one value alone
    kind_of_package = gguf.GGMLQuantizationType[kind]
    made = MAKERS[kind](weights.unflatten(1, (-1, 32))).flatten(1).numpy()
    found = gguf.quants.dequantize(made, kind_of_package)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind_of_package), kind_of_package)
    errors = [np.square(each - weights.numpy()).sum() for each in (found, theirs)]
    assert least * errors[1] < errors[0] < (0.9 if kind == "Q4_1" else 1.001) * errors[1]
    assert np.abs(found[3, 32:64]).max() < 1e-6
    assert np.abs(found[4] - 0.25).max() < 1e-3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", ["llama", "gemma3"])  # with a head of its own, and with a tied one
def test_logits_are_those_of_the_nearest_integers(case, bits):
    model = make_model(case, hidden_size=256, intermediate_size=512).bfloat16()
    tied = model.config.tie_word_embeddings
    found = quantise(copy.deepcopy(model), bits, "here")
    layers = {name: each for name, each in found.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(layers) == 1 + 7 * model.config.num_hidden_layers
    rounded = copy.deepcopy(model)
    for name, layer in layers.items():
        made, own = expanded(layer.stored, torch.float32), rounded.get_submodule(name)
        assert layer.stored.kind == ("Q8_0" if bits == 8 or name.endswith(("lm_head", "v_proj")) else "Q4_1")
        own.weight = torch.nn.Parameter(made.bfloat16(), requires_grad=False)
    for ids in (IDS, IDS[:, :1]):
        expected, plain = logits(copy.deepcopy(rounded).float(), ids), logits(rounded, ids)
        errors = [(each - expected).norm() / expected.norm() for each in (logits(found, ids), plain)]
        assert errors[0] < 2 * errors[1] + 0.01
    saved = found.state_dict()
    assert ("lm_head.weight" in saved) == (not tied)
    assert torch.equal(saved["model.layers.0.mlp.up_proj.weight"], rounded.model.layers[0].mlp.up_proj.weight)
    assert found.get_input_embeddings().weight.dtype == torch.bfloat16
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert torch.equal(logits(other), logits(found))
        assert weights_digest(other) == weights_digest(found)


def test_a_folder_is_opened_and_what_it_read_is_no_other_models(tmp_path, monkeypatch):
    save_model(tmp_path / "tiny", make_model("llama", hidden_size=64, intermediate_size=128))
    models = {bits: load(tmp_path / "tiny", bits, dtype="auto" if bits else "bfloat16")[0] for bits in (None, 4, 8)}
    assert len({weights_digest(model) for model in models.values()}) == 3
    memory = models[4].new_memory()
    with torch.no_grad():
        models[4](IDS, past_key_values=memory)
    memory.save(tmp_path / "memory")
    models[4].new_memory().load(tmp_path / "memory")
    with pytest.raises(UserError, match="another model"):
        models[8].new_memory().load(tmp_path / "memory")
    with pytest.raises(UserError, match="integers of few bits"):
        wrap(open_model(tmp_path / "tiny", 4), None)
    monkeypatch.setattr(
        "landmark.models.huggingface.safe_loading.AutoModelForCausalLM", None
    )  # nothing is loaded for a refusal
    for refused in ({"dtype": torch.float32}, {"dtype": "float16"}, {"device_map": "cuda:0"}):
        with pytest.raises(UserError, match="model.bits=4: is for model.dtype=bfloat16"):
            open_model(tmp_path / "tiny", 4, **refused)
