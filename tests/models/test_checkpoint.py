"""Weights on disk: whole or not at all, and only for the model they belong to."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import landmark
from landmark.models import Decoder, DecoderConfig, build, save
from landmark.models.checkpoint import load, new_decoder
from landmark.models.config import Landmarks
from landmark.utils.errors import UserError
from landmark.utils.trust import name_modules
from tests.saved import edit, hash_again

CONFIG = DecoderConfig(64, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32, landmarks=Landmarks(60, 5))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save(Decoder(CONFIG), tmp_path)
    return tmp_path


def test_round_trip(folder):
    torch.manual_seed(0)
    expected = Decoder(CONFIG)
    model = landmark.models.load(folder)
    assert model.config == CONFIG
    assert not model.training
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=0, rtol=0)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "weights.sha256"}


def test_the_authors_names_are_read(folder):
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    names = {
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
    }
    names |= {"mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}
    theirs = {"lm_head.weight": model.embedding.weight.data.clone()}
    for name, tensor in model.state_dict().items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        name = name.replace("blocks.", "transformer.h.").replace("embedding.", "transformer.wte.")
        theirs["transformer.ln_f.weight" if name == "norm.weight" else name] = tensor.clone()
    save_file(theirs, folder / "model.safetensors")
    hash_again(folder)
    loaded = load(folder)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=0, rtol=0)


def test_another_configuration_is_refused_and_the_difference_shown(folder):
    expected = replace(CONFIG, landmarks=Landmarks(60, 7), num_layers=3, backend="reference")
    with pytest.raises(UserError, match="num_layers is 2, not 3; block_size is 5, not 7"):
        load(folder, expected)
    load(folder, replace(CONFIG, backend="reference"))


def test_a_training_starts_from_it(folder, configure):
    """The weights are those of the folder, whatever would have been drawn, and are trained on."""
    shape = ("model.num_layers=2", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "model.block_size=5")
    config, vocabulary = (
        configure("model=landmark", "recipe=paper", *shape),
        SimpleNamespace(vocab_size=64, landmark=60),
    )
    model = build(config.model, vocabulary, start=str(folder))
    assert model.training
    for name, tensor in load(folder).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert not torch.equal(build(config.model, vocabulary).state_dict()["embedding.weight"], tensor_of(folder))
    with pytest.raises(UserError, match="block_size is 5, not 7"):
        build(replace(config.model, block_size=7), vocabulary, start=str(folder))


@pytest.mark.parametrize("options", [[], ["model.landmark_key=mean", "model.landmark_bias=true"]])
def test_a_landmark_model_starts_from_a_plain_one(options, configure, tmp_path):
    """Before the first landmark it says what the plain model says; its embedding is the mean of the others."""
    shape = ["model.num_layers=2", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "recipe=paper"]
    shape += ["model.key_offset=0.5", "model.rotary_fraction=0.5"]
    vocabulary = SimpleNamespace(vocab_size=64, landmark=60)
    plain = build(configure("model=transformer", *shape).model, vocabulary)
    save(plain, tmp_path / "plain")
    config = configure("model=landmark", "model.block_size=5", *shape, *options).model
    model = build(config, vocabulary, start=str(tmp_path / "plain"))
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
        build(replace(config, mlp_dim=9), vocabulary, start=str(tmp_path / "plain"))


def tensor_of(folder):
    return load(folder).state_dict()["embedding.weight"]


def test_files_cut_short_are_refused(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[: len(content) // 2], content[:5], b""):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match="model.safetensors is damaged"):
            load(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors does not exist"):
        load(folder)


def test_weights_that_do_not_fit_are_refused(folder):
    save_file({"embedding.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    hash_again(folder)
    with pytest.raises(UserError, match="does not fit"):
        load(folder)
    (folder / "config.json").write_text('{"kind": "landmark"')
    with pytest.raises(UserError, match=r"config\.json"):
        load(folder)
    (folder / "config.json").write_text('{"colour": "red"}')
    hash_again(folder)
    with pytest.raises(UserError, match=r"config\.json.*kind"):
        load(folder)
    edit(folder / "config.json", **CONFIG.to_flat(), colour="red")
    with pytest.raises(UserError, match=r"model\.colour"):
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


def test_a_removed_setting_and_a_removed_value_are_refused(folder):
    for change, said in (
        ({"landmark_key": "pooled"}, "landmark_key=pooled"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"short_convolution": 4}, "model.short_convolution: there is no such setting"),
    ):
        edit(folder / "config.json", **{"landmark_key": "token", "alpha": None} | change)
        with pytest.raises(UserError, match=said):
            load(folder)
