"""Expected outputs of the authors' public implementation, where its folder is at hand.

The folder is the one that LANDMARK_GOLDEN names, by default ../shared/golden; its settings.json is the list of what is
checked.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from landmark.attention import ContextMiss
from landmark.memory import Memory, RecurrentMemory
from landmark.memory.select import Best
from landmark.memory.settings import TIERS
from landmark.memory.store import Store
from landmark.models import Decoder
from landmark.models.checkpoint import from_authors_names
from landmark.models.decoder import SelfAttention
from tests.configurations import decoder_config

FOLDER = Path(os.environ.get("LANDMARK_GOLDEN", Path(__file__).parents[1] / ".." / "shared" / "golden"))
HAVE = (FOLDER / "settings.json").is_file()
SETTINGS = json.loads((FOLDER / "settings.json").read_text()) if HAVE else {}
pytestmark = pytest.mark.skipif(not HAVE, reason=f"no golden vectors in {FOLDER}")


def arrays(name: str) -> dict[str, torch.Tensor]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def settings(group: str, *names: str) -> list:
    """The settings of a group as test parameters; those with these names, if any are given."""
    return [pytest.param(k, v, id=k) for k, v in SETTINGS.get(group, {}).items() if not names or k in names]


def golden_model(name: str, kind: str, **extra) -> Decoder:
    config = decoder_config(
        kind=kind,
        vocab_size=SETTINGS["vocab_size"],
        num_layers=SETTINGS["n_layer"],
        num_heads=SETTINGS["n_head"],
        head_dim=SETTINGS["n_embd"] // SETTINGS["n_head"],
        mlp_dim=4 * SETTINGS["n_embd"],
        rope_base=SETTINGS["rope_base"],
        **extra,
    )
    model = Decoder(config).double()
    model.load_state_dict(from_authors_names(arrays(f"{name}_weights")))
    return model


@pytest.fixture(params=["blockwise", "reference"])
def landmark_model(request) -> Decoder:
    return golden_model(
        "landmark",
        "landmark",
        block_size=SETTINGS["block_size"],
        landmark_id=SETTINGS["landmark_id"],
        backend=request.param,
    )


def nll(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), following, reduction="none")


def read_in_chunks(model: Decoder, tokens: torch.Tensor, memory, size: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(chunk, memory=memory) for chunk in tokens.split(size, 1)], 1)


def training_phases() -> list[int]:
    names = np.load(FOLDER / "landmark_expected.npz").files if HAVE else []
    return sorted(int(n.removeprefix("train_phase").removesuffix("_loss")) for n in names if n.endswith("_loss"))


def training_window(phase: int) -> dict[str, torch.Tensor]:
    return {
        k.removeprefix(f"train_phase{phase}_"): v
        for k, v in arrays("landmark_expected").items()
        if k.startswith(f"train_phase{phase}_")
    }


@pytest.mark.parametrize("phase", training_phases())
def test_training_window(landmark_model, phase):
    expected = training_window(phase)
    tokens, targets = expected["tokens"], expected["targets"]
    logits = landmark_model.head(landmark_model.hidden(tokens, torch.full((len(tokens),), phase)))
    torch.testing.assert_close(nll(logits[:, :-1], tokens[:, 1:]), expected["nll"], atol=1e-6, rtol=0)
    torch.testing.assert_close(logits[:, -8:], expected["logits_last8"], atol=1e-5, rtol=0)
    loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1)
    torch.testing.assert_close(loss, expected["loss"], atol=1e-6, rtol=0)
    loss.backward()
    assert_gradients(landmark_model, expected, 1e-6)


def assert_gradients(model: Decoder, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    parameters = dict(model.named_parameters())
    gradients = from_authors_names({k.removeprefix("grad_"): v for k, v in expected.items() if "grad_" in k})
    assert gradients
    for name, gradient in gradients.items():
        found = parameters[name].grad
        assert found is not None
        torch.testing.assert_close(found.double(), gradient, atol=tolerance, rtol=0)


@pytest.mark.parametrize("phase", training_phases()[-1:])
def test_training_window_in_fused_kernels(phase):
    """In float32: to 2e-5 nats, and gradients to 1e-5."""
    expected = training_window(phase)
    sizes = {"block_size": SETTINGS["block_size"], "landmark_id": SETTINGS["landmark_id"]}
    model = golden_model("landmark", "landmark", **sizes, backend="triton").float()
    tokens, targets = expected["tokens"], expected["targets"]
    logits = model.head(model.hidden(tokens, torch.full((len(tokens),), phase)))
    found = nll(logits[:, :-1], tokens[:, 1:]).double()
    torch.testing.assert_close(found, expected["nll"], atol=2e-5, rtol=0)
    F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1).backward()
    assert_gradients(model, expected, 1e-5)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "setting"), settings("memory_settings"))
def test_landmark_memory(name, setting, tier):
    model = golden_model("landmark", "landmark", block_size=SETTINGS["block_size"], landmark_id=SETTINGS["landmark_id"])
    expected = arrays("landmark_expected")
    kept = {"max_blocks": setting["blocks"], "k": setting["k"], "granularity": setting["granularity"]}
    memory = model.new_memory(**kept, tier=tier, cache=2)
    logits = read_in_chunks(model, expected["tokens"], memory, setting["local"])
    ours = nll(logits[:, :-1], expected["tokens"][:, 1:])
    torch.testing.assert_close(ours, expected[f"memory_{name}_nll"], atol=1e-6, rtol=0)
    torch.testing.assert_close(logits[:, -8:], expected[f"memory_{name}_logits_last8"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "setting"), settings("memory_settings", "k2", "k3_heads", "k3_tokens"))
def test_landmark_memory_in_fused_kernels(name, setting):
    """In float32: to 2e-5 nats. One setting of each granularity and two chunks, for the kernel is interpreted."""
    sizes = {"block_size": SETTINGS["block_size"], "landmark_id": SETTINGS["landmark_id"]}
    model = golden_model("landmark", "landmark", **sizes, backend="triton").float()
    kept = {"max_blocks": setting["blocks"], "k": setting["k"], "granularity": setting["granularity"]}
    expected = arrays("landmark_expected")
    tokens = expected["tokens"][:1, : 2 * setting["local"]]
    logits = read_in_chunks(model, tokens, model.new_memory(**kept), setting["local"])
    found = nll(logits[:, :-1], tokens[:, 1:]).double()
    torch.testing.assert_close(found, expected[f"memory_{name}_nll"][:1, : found.shape[1]], atol=2e-5, rtol=0)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "setting"), settings("layer_settings"))
def test_attention_layer_with_memory(name, setting, tier):
    expected = arrays("layer_expected")
    block_size = SETTINGS["block_size"]
    select, store = Best(setting["granularity"], tied_layers=()), Store(setting["blocks"], tier, cache=2)
    memory = Memory(block_size, setting["k"], select=select, store=store)
    memory.cutoff = setting.get("cutoff", 0.0)
    heads = SETTINGS["n_head"]
    layer = SelfAttention(decoder_config("transformer", 1, 1, heads, expected["x"].shape[-1] // heads, 1)).double()
    layer.qkv.weight.data, layer.out.weight.data = expected["c_attn"], expected["c_proj"]
    extra = ContextMiss(layer.key(expected["cmt_x"])) if "cutoff" in setting else None
    outputs, start = [], 0
    while start < expected["x"].shape[1]:
        raw_fed = start - start // (block_size + 1)
        stop = (raw_fed + setting["local"]) // block_size + raw_fed + setting["local"]
        chunk = expected["x"][:, start:stop]
        outputs.append(layer.output(memory.attend(0, *layer(chunk), extra)))
        memory.commit()
        start = stop
    torch.testing.assert_close(torch.cat(outputs, 1), expected[name], atol=1e-5, rtol=0)


def cmt_model(backend: str = "auto") -> Decoder:
    sizes = {"block_size": SETTINGS["block_size"], "landmark_id": SETTINGS["landmark_id"]}
    return golden_model("cmt", "landmark", **sizes, backend=backend, cmt=True)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("controlled", ["none", "all"])
def test_training_window_with_a_context_miss_token(controlled, backend):
    expected, model = arrays("cmt_expected"), cmt_model(backend)
    tokens = expected["train_tokens"]
    blocks = tokens.shape[1] // SETTINGS["block_size"] + 1
    mask = torch.full((len(tokens), SETTINGS["n_layer"], blocks), controlled == "all")
    logits = model.head(model.hidden(tokens, controlled=mask))
    wanted = expected[f"train_{controlled}_controlled_nll"]
    torch.testing.assert_close(nll(logits[:, :-1], tokens[:, 1:]), wanted, atol=1e-6, rtol=0)
    last = expected[f"train_{controlled}_controlled_logits_last8"]
    torch.testing.assert_close(logits[:, -8:], last, atol=1e-5, rtol=0)


@pytest.mark.parametrize("controlled", ["none", "all"])
def test_training_window_with_a_context_miss_token_in_fused_kernels(controlled):
    """In float32: to 2e-5 nats."""
    expected, model = arrays("cmt_expected"), cmt_model("triton").float()
    tokens = expected["train_tokens"]
    blocks = tokens.shape[1] // SETTINGS["block_size"] + 1
    mask = torch.full((len(tokens), SETTINGS["n_layer"], blocks), controlled == "all")
    found = nll(model.head(model.hidden(tokens, controlled=mask))[:, :-1], tokens[:, 1:]).double()
    torch.testing.assert_close(found, expected[f"train_{controlled}_controlled_nll"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "setting"), settings("cmt_settings"))
def test_landmark_memory_with_a_context_miss_token(name, setting, tier):
    expected, model = arrays("cmt_expected"), cmt_model()
    kept = {"max_blocks": setting["blocks"], "k": setting["k"], "granularity": setting["granularity"]}
    memory = model.new_memory(**kept, cutoff=setting["cutoff"], tier=tier, cache=2)
    logits = read_in_chunks(model, expected["tokens"], memory, setting["local"])
    ours = nll(logits[:, :-1], expected["tokens"][:, 1:])
    torch.testing.assert_close(ours, expected[f"memory_{name}_nll"], atol=1e-6, rtol=0)
    torch.testing.assert_close(logits[:, -8:], expected[f"memory_{name}_logits_last8"], atol=1e-5, rtol=0)


def test_plain_transformer():
    expected = arrays("transformer_expected")
    tokens = expected["tokens"][:, : expected["plain_nll"].shape[1] + 1]
    logits = golden_model("transformer", "transformer")(tokens)
    torch.testing.assert_close(nll(logits[:, :-1], tokens[:, 1:]), expected["plain_nll"], atol=1e-6, rtol=0)
    torch.testing.assert_close(logits[:, -8:], expected["plain_logits_last8"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "setting"), settings("xl_settings"))
def test_transformer_xl(name, setting):
    expected = arrays("transformer_expected")
    model = golden_model("transformer", "transformer_xl", window=setting["window"], cache=setting["cache"])
    memory = model.new_memory()
    assert isinstance(memory, RecurrentMemory)
    logits = read_in_chunks(model, expected["tokens"], memory, setting["window"])
    ours = nll(logits[:, :-1], expected["tokens"][:, 1:])
    torch.testing.assert_close(ours, expected[f"xl_{name}_nll"], atol=1e-6, rtol=0)
    torch.testing.assert_close(logits[:, -8:], expected[f"xl_{name}_logits_last8"], atol=1e-5, rtol=0)
