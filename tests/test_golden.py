"""Expected outputs: of an independent computation (tests/golden), and of the authors' public implementation where its
folder is at hand: the one that LANDMARK_GOLDEN names, by default ../shared/golden. A settings.json lists what each
folder has."""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from landmark.attention import ContextMiss
from landmark.memory import RecurrentMemory
from landmark.models import Decoder
from landmark.models.checkpoint import from_authors_names
from landmark.models.decoder import SelfAttention
from landmark.utils.constants import TIERS
from tests.configurations import decoder_config
from tests.golden import make
from tests.memory.reading import new_memory

AUTHORS = Path(os.environ.get("LANDMARK_GOLDEN", Path(__file__).parents[1] / ".." / "shared" / "golden"))


class Golden:
    """A folder of expected outputs. exact: how far losses in float64 may be off; logits and outputs, ten times."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.settings = json.loads((folder / "settings.json").read_text())
        self.exact = self.settings.get("tolerance", 1e-6)

    @functools.cache  # noqa: B019 (of two folders)
    def arrays(self, name: str) -> dict[str, torch.Tensor]:
        with np.load(self.folder / f"{name}.npz") as file:
            found = {key: torch.from_numpy(file[key]) for key in file.files}
        return {key: x.double() if x.is_floating_point() else x for key, x in found.items()}

    def model(self, name: str, kind: str = "landmark", backend: str = "auto", **extra) -> Decoder:
        """In float64; with the fused kernels, interpreted, in float32."""
        said = self.settings
        if kind == "landmark":
            extra |= {"block_size": said["block_size"], "landmark_id": said["landmark_id"], "cmt": name == "cmt"}
        shape = said["vocab_size"], said["n_layer"], said["n_head"], said["n_embd"] // said["n_head"]
        config = decoder_config(kind, *shape, 4 * said["n_embd"], rope_base=said["rope_base"], backend=backend, **extra)
        model = Decoder(config).double()
        model.load_state_dict(from_authors_names(self.arrays(f"{name}_weights")))
        return model.float() if backend == "triton" else model

    def assert_predicts(self, logits: torch.Tensor, tokens: torch.Tensor, file: str, name: str = "") -> None:
        """Losses, and the last logits; float32 to 2e-5 nats."""
        is_exact, expected = logits.dtype == torch.float64, self.arrays(file)
        found = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").double()
        wanted = expected[f"{name}nll"][: len(found), : found.shape[1]]
        torch.testing.assert_close(found, wanted, atol=self.exact if is_exact else 2e-5, rtol=0)
        if is_exact:
            torch.testing.assert_close(logits[:, -8:], expected[f"{name}logits_last8"], atol=10 * self.exact, rtol=0)


OURS = Golden("ours", make.FOLDER)
GOLDEN = [OURS, *([Golden("authors", AUTHORS)] if (AUTHORS / "settings.json").is_file() else [])]
of_each = pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)


def each(group: str) -> pytest.MarkDecorator:
    cases = [(golden, *item) for golden in GOLDEN for item in golden.settings[group].items()]
    return pytest.mark.parametrize(("golden", "name", "setting"), cases, ids=[f"{g.name}-{n}" for g, n, _ in cases])


def read_in_chunks(model: Decoder, tokens: torch.Tensor, memory, size: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(chunk, memory=memory) for chunk in tokens.split(size, 1)], 1)


def test_our_vectors_are_those_of_their_program():
    """Up to the rounding of another NumPy."""
    assert OURS.settings == make.SETTINGS
    for file, arrays in make.make().items():
        stored = OURS.arrays(file)
        assert stored.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_allclose(stored[name], array, rtol=0, atol=1e-8 if "grad_" in name else 1e-12)


def phases(golden: Golden) -> list[int]:
    names = golden.arrays("landmark_expected")
    return sorted(int(name[len("train_phase") : -len("_loss")]) for name in names if name.endswith("_loss"))


WINDOWS = [
    (g, backend, phase) for g in GOLDEN for backend in ("blockwise", "reference", "triton") for phase in phases(g)
]


@pytest.mark.parametrize(("golden", "backend", "phase"), WINDOWS, ids=[f"{g.name}-{b}-{p}" for g, b, p in WINDOWS])
def test_training_window(golden, backend, phase):
    model, prefix = golden.model("landmark", backend=backend), f"train_phase{phase}_"
    expected = golden.arrays("landmark_expected")
    tokens, targets = expected[f"{prefix}tokens"], expected[f"{prefix}targets"]
    logits = model.head(model.hidden(tokens, torch.full((len(tokens),), phase)))
    golden.assert_predicts(logits, tokens, "landmark_expected", prefix)
    loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1)
    loss.backward()
    gradients = {k.removeprefix(f"{prefix}grad_"): v for k, v in expected.items() if k.startswith(f"{prefix}grad_")}
    assert gradients
    parameters, tolerance = dict(model.named_parameters()), 1e-5 if backend == "triton" else max(golden.exact, 1e-8)
    wanted = {"loss": (loss, expected[f"{prefix}loss"])}  # differences give gradients to 1e-9
    wanted |= {name: (parameters[name].grad, x) for name, x in from_authors_names(gradients).items()}
    for found, known in wanted.values():
        torch.testing.assert_close(found.double(), known, atol=tolerance, rtol=0)


CONTROLLED = [(OURS, "some"), *((golden, controlled) for golden in GOLDEN for controlled in ("none", "all"))]


@pytest.mark.parametrize("backend", ["blockwise", "reference", "triton"])
@pytest.mark.parametrize(("golden", "controlled"), CONTROLLED, ids=[f"{g.name}-{c}" for g, c in CONTROLLED])
def test_training_window_with_a_context_miss_token(golden, controlled, backend):
    expected, model = golden.arrays("cmt_expected"), golden.model("cmt", backend=backend)
    tokens, name = expected["train_tokens"], f"train_{controlled}_controlled_"
    blocks = tokens.shape[1] // golden.settings["block_size"] + 1
    mask = torch.full((len(tokens), golden.settings["n_layer"], blocks), controlled == "all")
    logits = model.head(model.hidden(tokens, controlled=expected.get(f"{name}mask", mask)))
    golden.assert_predicts(logits, tokens, "cmt_expected", name)


def assert_reads(
    golden: Golden, model: str, name: str, setting: dict, tier: str = "device", backend: str = "auto"
) -> None:
    """With the interpreted kernels one sample and two chunks."""
    tokens, decoder = golden.arrays(f"{model}_expected")["tokens"], golden.model(model, backend=backend)
    kept = {"max_blocks": setting["blocks"], "k": setting["k"], "granularity": setting["granularity"]}
    kept |= {"cutoff": setting["cutoff"]} if "cutoff" in setting else {}
    tokens = tokens[:1, : 2 * setting["local"]] if backend == "triton" else tokens
    logits = read_in_chunks(decoder, tokens, decoder.new_memory(**kept, tier=tier, cache=2), setting["local"])
    golden.assert_predicts(logits, tokens, f"{model}_expected", f"memory_{name}_")


@pytest.mark.parametrize("tier", TIERS)
@each("memory_settings")
def test_landmark_memory(golden, name, setting, tier):
    assert_reads(golden, "landmark", name, setting, tier)


@of_each
def test_landmark_memory_in_fused_kernels(golden):
    """tests/memory/test_fused.py compares the backends for every granularity."""
    assert_reads(golden, "landmark", "k2", golden.settings["memory_settings"]["k2"], backend="triton")


@each("cmt_settings")
def test_landmark_memory_with_a_context_miss_token(golden, name, setting):
    assert_reads(golden, "cmt", name, setting)


@each("layer_settings")
def test_attention_layer_with_memory(golden, name, setting):
    expected, block_size, heads = (golden.arrays("layer_expected"), *map(golden.settings.get, ("block_size", "n_head")))
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
    torch.testing.assert_close(torch.cat(outputs, 1), expected[name], atol=10 * golden.exact, rtol=0)


@of_each
def test_plain_transformer(golden):
    expected = golden.arrays("transformer_expected")
    tokens = expected["tokens"][:, : expected["plain_nll"].shape[1] + 1]
    logits = golden.model("transformer", "transformer")(tokens)
    golden.assert_predicts(logits, tokens, "transformer_expected", "plain_")


@each("xl_settings")
def test_transformer_xl(golden, name, setting):
    tokens = golden.arrays("transformer_expected")["tokens"]
    model = golden.model("transformer", "transformer_xl", window=setting["window"], cache=setting["cache"])
    memory = model.new_memory()
    assert isinstance(memory, RecurrentMemory)
    logits = read_in_chunks(model, tokens, memory, setting["window"])
    golden.assert_predicts(logits, tokens, "transformer_expected", f"xl_{name}_")
