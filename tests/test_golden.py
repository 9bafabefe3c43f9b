"""Expected outputs of the authors' public implementation, where its folder is at hand: the one that LANDMARK_GOLDEN
names, by default ../shared/golden; its settings.json lists what is checked."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from landmark.attention import ContextMiss
from landmark.memory import RecurrentMemory
from landmark.memory.settings import TIERS
from landmark.models import Decoder
from landmark.models.checkpoint import from_authors_names
from landmark.models.decoder import SelfAttention
from tests.configurations import decoder_config
from tests.memory.reading import new_memory

FOLDER = Path(os.environ.get("LANDMARK_GOLDEN", Path(__file__).parents[1] / ".." / "shared" / "golden"))
HAVE = (FOLDER / "settings.json").is_file()
SETTINGS = json.loads((FOLDER / "settings.json").read_text()) if HAVE else {}
pytestmark = pytest.mark.skipif(not HAVE, reason=f"no golden vectors in {FOLDER}")


def arrays(name: str) -> dict[str, torch.Tensor]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def settings(group: str) -> list:
    return [pytest.param(k, v, id=k) for k, v in SETTINGS.get(group, {}).items()]


def golden_model(name: str, kind: str = "landmark", backend: str = "auto", **extra) -> Decoder:
    """In float64; with the fused kernels, interpreted, in float32."""
    if kind == "landmark":
        extra |= {"block_size": SETTINGS["block_size"], "landmark_id": SETTINGS["landmark_id"], "cmt": name == "cmt"}
    heads, width = SETTINGS["n_head"], SETTINGS["n_embd"]
    shape = SETTINGS["vocab_size"], SETTINGS["n_layer"], heads, width // heads, 4 * width
    config = decoder_config(kind, *shape, rope_base=SETTINGS["rope_base"], backend=backend, **extra)
    model = Decoder(config).double()
    model.load_state_dict(from_authors_names(arrays(f"{name}_weights")))
    return model.float() if backend == "triton" else model


def read_in_chunks(model: Decoder, tokens: torch.Tensor, memory, size: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(chunk, memory=memory) for chunk in tokens.split(size, 1)], 1)


def assert_predicts(
    logits: torch.Tensor, tokens: torch.Tensor, expected: dict[str, torch.Tensor], name: str = ""
) -> None:
    """Losses to 1e-6 nats, and the last logits; float32 to 2e-5 nats."""
    is_exact = logits.dtype == torch.float64
    found = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").double()
    wanted = expected[f"{name}nll"][: len(found), : found.shape[1]]
    torch.testing.assert_close(found, wanted, atol=1e-6 if is_exact else 2e-5, rtol=0)
    if is_exact:
        torch.testing.assert_close(logits[:, -8:], expected[f"{name}logits_last8"], atol=1e-5, rtol=0)


PHASES = sorted(
    int(name.removeprefix("train_phase").removesuffix("_loss"))
    for name in (np.load(FOLDER / "landmark_expected.npz").files if HAVE else [])
    if name.endswith("_loss")
)
WINDOWS = [*((backend, phase) for backend in ("blockwise", "reference") for phase in PHASES)]
WINDOWS += [("triton", phase) for phase in PHASES[-1:]]


@pytest.mark.parametrize(("backend", "phase"), WINDOWS)
def test_training_window(backend, phase):
    model, prefix = golden_model("landmark", backend=backend), f"train_phase{phase}_"
    expected = {k.removeprefix(prefix): v for k, v in arrays("landmark_expected").items() if k.startswith(prefix)}
    tokens, targets, tolerance = expected["tokens"], expected["targets"], 1e-5 if backend == "triton" else 1e-6
    logits = model.head(model.hidden(tokens, torch.full((len(tokens),), phase)))
    assert_predicts(logits, tokens, expected)
    loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1)
    torch.testing.assert_close(loss.double(), expected["loss"], atol=tolerance, rtol=0)
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = from_authors_names({k.removeprefix("grad_"): v for k, v in expected.items() if "grad_" in k})
    assert gradients
    for name, gradient in gradients.items():
        found = parameters[name].grad
        torch.testing.assert_close(found.double(), gradient, atol=tolerance, rtol=0)


@pytest.mark.parametrize("backend", ["blockwise", "reference", "triton"])
@pytest.mark.parametrize("controlled", ["none", "all"])
def test_training_window_with_a_context_miss_token(controlled, backend):
    expected, model = arrays("cmt_expected"), golden_model("cmt", backend=backend)
    tokens = expected["train_tokens"]
    blocks = tokens.shape[1] // SETTINGS["block_size"] + 1
    mask = torch.full((len(tokens), SETTINGS["n_layer"], blocks), controlled == "all")
    logits = model.head(model.hidden(tokens, controlled=mask))
    assert_predicts(logits, tokens, expected, f"train_{controlled}_controlled_")


def assert_reads(model: str, name: str, setting: dict, tier: str = "device", backend: str = "auto") -> None:
    """With the interpreted kernels one sample and two chunks."""
    expected, decoder = arrays(f"{model}_expected"), golden_model(model, backend=backend)
    kept = {"max_blocks": setting["blocks"], "k": setting["k"], "granularity": setting["granularity"]}
    kept |= {"cutoff": setting["cutoff"]} if "cutoff" in setting else {}
    tokens = expected["tokens"][:1, : 2 * setting["local"]] if backend == "triton" else expected["tokens"]
    logits = read_in_chunks(decoder, tokens, decoder.new_memory(**kept, tier=tier, cache=2), setting["local"])
    assert_predicts(logits, tokens, expected, f"memory_{name}_")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "setting"), settings("memory_settings"))
def test_landmark_memory(name, setting, tier):
    assert_reads("landmark", name, setting, tier)


def test_landmark_memory_in_fused_kernels():
    """tests/memory/test_fused.py compares the backends for every granularity."""
    assert_reads("landmark", "k2", SETTINGS["memory_settings"]["k2"], backend="triton")


@pytest.mark.parametrize(("name", "setting"), settings("cmt_settings"))
def test_landmark_memory_with_a_context_miss_token(name, setting):
    assert_reads("cmt", name, setting)


@pytest.mark.parametrize(("name", "setting"), settings("layer_settings"))
def test_attention_layer_with_memory(name, setting):
    expected, block_size, heads = arrays("layer_expected"), SETTINGS["block_size"], SETTINGS["n_head"]
    kept = {"max_blocks": setting["blocks"], "k": setting["k"], "granularity": setting["granularity"]}
    memory = new_memory(block_size, **kept, cutoff=setting.get("cutoff", 0.0))
    layer = SelfAttention(decoder_config("transformer", 1, 1, heads, expected["x"].shape[-1] // heads, 1)).double()
    layer.qkv.weight.data, layer.out.weight.data = expected["c_attn"], expected["c_proj"]
    extra = ContextMiss(layer.key(expected["cmt_x"])) if "cutoff" in setting else None
    outputs, start = [], 0
    while start < expected["x"].shape[1]:
        raw_fed = start - start // (block_size + 1)
        stop = (raw_fed + setting["local"]) // block_size + raw_fed + setting["local"]
        chunk = expected["x"][:, start:stop]
        outputs.append(layer.output(memory.attend(1, *layer(chunk), extra)))
        memory.commit()
        start = stop
    torch.testing.assert_close(torch.cat(outputs, 1), expected[name], atol=1e-5, rtol=0)


def test_plain_transformer():
    expected = arrays("transformer_expected")
    tokens = expected["tokens"][:, : expected["plain_nll"].shape[1] + 1]
    assert_predicts(golden_model("transformer", "transformer")(tokens), tokens, expected, "plain_")


@pytest.mark.parametrize(("name", "setting"), settings("xl_settings"))
def test_transformer_xl(name, setting):
    expected = arrays("transformer_expected")
    model = golden_model("transformer", "transformer_xl", window=setting["window"], cache=setting["cache"])
    memory = model.new_memory()
    assert isinstance(memory, RecurrentMemory)
    logits = read_in_chunks(model, expected["tokens"], memory, setting["window"])
    assert_predicts(logits, expected["tokens"], expected, f"xl_{name}_")
