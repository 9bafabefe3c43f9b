"""Weights on disk: whole or not at all, and only for the model they belong to."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import landmark
from landmark.config.schema import ModelConfig
from landmark.models import Decoder, build, save
from landmark.models.checkpoint import load, new_decoder
from landmark.models.config import DecoderConfig, Landmarks, decoder_config
from landmark.utils.errors import UserError
from landmark.utils.files import HASHES
from landmark.utils.trust import name_modules
from tests.saved import edit, hash_again
from tests.training.training_case import assert_same_weights

CONFIG = DecoderConfig(64, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32, landmarks=Landmarks(60, 5))
SHAPE = ("model.num_layers=2", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "recipe=paper")
VOCABULARY = SimpleNamespace(vocab_size=64, landmark=60)


def new():
    torch.manual_seed(0)
    return Decoder(CONFIG)


@pytest.fixture
def folder(tmp_path):
    save(new(), tmp_path)
    return tmp_path


def test_round_trip_and_the_difference_to_another_configuration(folder):
    model = landmark.models.load(folder)
    assert model.config == CONFIG
    assert not model.training
    assert_same_weights(model, new())
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", HASHES}
    named = [line.split("  ")[1] for line in (folder / HASHES).read_text().splitlines()]
    assert named == ["config.json", "model.safetensors"]
    expected = replace(CONFIG, landmarks=Landmarks(60, 7), num_layers=3, backend="reference")
    with pytest.raises(UserError, match="num_layers is 2, not 3; block_size is 5, not 7"):
        load(folder, expected)
    load(folder, replace(CONFIG, backend="reference"))


def test_the_authors_names_are_read(folder):
    names = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.qkv": "attn.c_attn", "mlp_in": "mlp.c_fc"}
    names |= {"attention.out": "attn.c_proj", "mlp_out": "mlp.c_proj"}
    names |= {"blocks.": "transformer.h.", "embedding.": "transformer.wte."}
    model, theirs = new(), {"lm_head.weight": torch.zeros(64, 16)}
    for name, tensor in model.state_dict().items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        theirs["transformer.ln_f.weight" if name == "norm.weight" else name] = tensor.clone()
    save_file(theirs, folder / "model.safetensors")
    hash_again(folder)
    assert_same_weights(load(folder), model)


def test_a_training_starts_from_it(folder, configure):
    config = configure("model=landmark", "model.block_size=5", *SHAPE).model
    model = build(config, VOCABULARY, start=str(folder))
    assert model.training
    assert_same_weights(model, load(folder))
    drawn = build(config, VOCABULARY).state_dict()["embedding.weight"]
    assert not torch.equal(drawn, model.state_dict()["embedding.weight"])
    with pytest.raises(UserError, match="block_size is 5, not 7"):
        build(replace(config, block_size=7), VOCABULARY, start=str(folder))


@pytest.mark.parametrize("options", [[], ["model.landmark_key=mean", "model.landmark_bias=true"]])
def test_a_landmark_model_starts_from_a_plain_one(options, configure, tmp_path):
    """Before the first landmark it says what the plain model says; its embedding is the mean of the others."""
    shape = [*SHAPE, "model.key_offset=0.5", "model.rotary_fraction=0.5"]
    plain = build(configure("model=transformer", *shape).model, VOCABULARY)
    save(plain, tmp_path / "plain")
    config = configure("model=landmark", "model.block_size=5", *shape, *options).model
    model = build(config, VOCABULARY, start=str(tmp_path / "plain"))
    assert model.training
    embeddings, others = model.input_embeddings().weight, torch.arange(64) != 60
    torch.testing.assert_close(embeddings[60], plain.input_embeddings().weight[others].mean(0))
    assert torch.equal(embeddings[others], plain.input_embeddings().weight[others])
    tokens = torch.randint(60, (1, 17))
    if not options:
        difference = (model(tokens) - plain(tokens))[..., others].abs().amax((0, 2))
        assert difference[:5].max() < 1e-5
        assert difference[5:].min() > 1e-4
    else:
        assert [block.attention.landmark_bias[0].item() for block in model.blocks] == [pytest.approx(math.log(5))] * 2
    with pytest.raises(UserError, match="mlp_dim is 32, not 9"):
        build(replace(config, mlp_dim=9), VOCABULARY, start=str(tmp_path / "plain"))


def written(change):
    """Another content of the weights' file. change: of the one that there is; None: there is none."""

    def changed(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = change(path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)

    return changed


def weights(change):
    """Other weights, with the hash of their file. change: returns them."""

    def changed(folder: Path) -> None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        hash_again(folder)

    return changed


def not_finite(value):
    return weights(lambda found: found | {"norm.weight": torch.full((16,), value)})


def config(content=None, **changes):
    """Another configuration, with its hash: this text, or some settings."""

    def changed(folder: Path) -> None:
        if changes:
            edit(folder / "config.json", **changes)
            return
        (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        hash_again(folder)

    return changed


def hashes(content):
    """Another list of hashes; a number: its first lines; "folder": one in its place; None: there is none."""

    def changed(folder: Path) -> None:
        lines = (folder / HASHES).read_text().splitlines(keepends=True)
        (folder / HASHES).unlink()
        if content == "folder":
            (folder / HASHES).mkdir()
        elif content is not None:
            (folder / HASHES).write_text("".join(lines[:content]) if isinstance(content, int) else content)

    return changed


RETRAIN = r"weights\.sha256.*: delete the folder and train again"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (written(lambda content: content[: len(content) // 2]), "model.safetensors is damaged"),
        *((written(lambda _, content=content: content), "model.safetensors is damaged") for content in (b"12345", b"")),
        (
            written(lambda content: content[:-4096] + bytes(4096)),
            r"is damaged, its SHA-256 differs from .*\.sha256: dele",
        ),
        (written(lambda _: None), r"model\.safetensors does not exist"),
        *((hashes(content), RETRAIN) for content in ("", None, "folder", "0" * 64 + "  model.safetensors\n", 1)),
        (weights(lambda _: {"embedding.weight": torch.zeros(3, 3)}), "does not fit"),
        *((not_finite(float(x)), r"the weight norm\.weight has values that are not finite") for x in ("nan", "inf")),
        *((config(content), r"config\.json") for content in (None, [], 3, '{"kind": "landmark"')),
        (config({"colour": "red"}), r"config\.json.*kind"),
        (config(num_layers="two"), r"config\.json"),
        (config(colour="red"), r"model\.colour"),
        (config(landmark_key="pooled"), "landmark_key=pooled"),
        (config(short_convolution=4), "model.short_convolution: there is no such setting"),
    ],
)
def test_damaged_and_changed_files_are_refused_in_one_line(folder, damage, said):
    damage(folder)
    with pytest.raises(UserError, match=said):
        load(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", r"landmark/models/nowhere\.py"),
        ("generation", r"landmark/models/generation\.py"),
        ("../decoder", "module ../decoder on Python's path"),
    ],
)
def test_an_unknown_architecture_is_refused(name, said):
    name_modules([name])
    with pytest.raises(UserError, match=rf"model\.architecture={name}: there is no {said} that has a Model"):
        new_decoder(replace(CONFIG, architecture=name))


# ---- configurations

WIDTHS = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}


def test_files_name_what_is_not_the_default_and_a_memory_knows_its_model():
    flat = {"kind": "landmark", "vocab_size": 20, "landmark_id": 19, "block_size": 3, "key_offset": 0.5, **WIDTHS}
    config = DecoderConfig.from_flat(flat | {"fan_out": 4, "levels": 2, "qk_norm": False, "rope_base": None})
    assert config.options == {"fan_out": 4, "levels": 2}
    assert config.to_flat() == flat | config.options
    assert DecoderConfig.from_flat(config.to_flat()) == config
    # A memory knows its model by all but the backend and the architecture.
    same = replace(config, backend="reference"), replace(config, architecture="mine")
    others = replace(config, options={"fan_out": 2}), replace(config, keys=replace(config.keys, norm=True))
    assert {each.fingerprint() for each in same} == {config.fingerprint()}
    assert len({each.fingerprint() for each in (config, *others)}) == 3
    decoder_config(ModelConfig("transformer", **WIDTHS, block_size=0))
    with pytest.raises(UserError, match="model=transformer has no landmarks"):
        decoder_config(ModelConfig("transformer", **WIDTHS), cmt=True)
