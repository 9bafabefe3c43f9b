"""Weights on disk: whole or not at all, and only for the model they belong to."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import landmark
from landmark.experiment.config.schema import ModelConfig
from landmark.models import Decoder, build, save
from landmark.models.checkpoint import load
from landmark.models.config import DecoderConfig, Landmarks, decoder_config
from landmark.utils.errors import UserError
from landmark.utils.files import HASHES
from landmark.utils.weights import weights_digest
from tests.experiment.training.training_case import assert_same_weights
from tests.saved import edit, hash_again

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


def written(file, content, again=False):
    """Another content of a file. content: made of the one before; None: there is none. again: hashes fit it."""

    def changed(folder: Path) -> None:
        new = content((folder / file).read_bytes())
        (folder / file).unlink() if new is None else (folder / file).write_bytes(new)
        if again:
            hash_again(folder)

    return changed


def edited(**changes):
    return lambda folder: edit(folder / CONFIGURATION, **changes)


def poisoned(value):
    tensor = torch.full((16,), value)
    return written(WEIGHTS, lambda old: save_tensors(load_tensors(old) | {"norm.weight": tensor}), True)


WEIGHTS, CONFIGURATION = "model.safetensors", "config.json"
RETRAIN = r"weights\.sha256.*: delete the folder and train again"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (written(WEIGHTS, lambda old: old[:-4096] + bytes(4096)), r"is damaged, its SHA-256 differs .*\.sha256: dele"),
        (written(WEIGHTS, lambda _: None), r"model\.safetensors does not exist"),
        *((written(HASHES, lambda _, new=new: new), RETRAIN) for new in (None, b"", b"0000")),
        (written(WEIGHTS, lambda _: save_tensors({"embedding.weight": torch.zeros(3, 3)}), True), "does not fit"),
        (poisoned(math.nan), r"the weight norm\.weight has values that are not finite"),
        (written(CONFIGURATION, lambda _: b"[]", True), r"config\.json"),
        (written(CONFIGURATION, lambda _: b"{}", True), r"config\.json.*kind"),
        (edited(num_layers="two"), r"config\.json"),
        (edited(colour="red"), r"model\.colour"),
        (edited(landmark_key="pooled"), "landmark_key=pooled"),
    ],
)
def test_damaged_and_changed_files_are_refused_in_one_line(folder, damage, said):
    damage(folder)
    with pytest.raises(UserError, match=said):
        load(folder)


# ---- configurations

WIDTHS = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}


def test_files_name_what_is_not_the_default_and_a_memory_knows_its_model():
    flat = {"kind": "landmark", "vocab_size": 20, "landmark_id": 19, "block_size": 3, "key_offset": 0.5, **WIDTHS}
    config = DecoderConfig.from_flat(flat | {"masked": True, "qk_norm": False, "rope_base": None})
    assert config.to_flat() == flat | {"masked": True}
    assert DecoderConfig.from_flat(config.to_flat()) == config
    # A memory knows its model by all but the backend and the architecture.
    same = replace(config, backend="reference"), replace(config, architecture="mine")
    others = replace(config, masked=False), replace(config, keys=replace(config.keys, norm=True))
    assert {each.fingerprint() for each in same} == {config.fingerprint()}
    assert len({each.fingerprint() for each in (config, *others)}) == 3
    one, other = new(), new()
    assert one.fingerprint() == other.fingerprint()
    other.norm.weight.data[0] += 1
    assert one.fingerprint() != other.fingerprint() == other.new_memory().model()
    decoder_config(ModelConfig("transformer", **WIDTHS, block_size=0))
    with pytest.raises(UserError, match="model.fan_out: there is no such setting; .*tried.md"):  # it was removed
        DecoderConfig.from_flat(flat | {"fan_out": 2})
    with pytest.raises(UserError, match="model=transformer has no landmarks"):
        decoder_config(ModelConfig("transformer", **WIDTHS), cmt=True)


# ---- what tells two models apart: all that decides keys and values, wherever it is kept, and nothing else


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 64))


def test_one_changed_number_type_or_shape_is_another_model_and_a_weight_without_content_none():
    changed = model()
    before = weights_digest(changed)
    assert before == weights_digest(model())
    with torch.no_grad():
        changed[0].weight[257, 3] += 1
    assert weights_digest(changed) != before
    with torch.no_grad():
        changed[0].weight[257, 3] -= 1
        changed[0].weight.copy_(model()[0].weight)
    assert weights_digest(changed) == before
    changed[1].weight.data = changed[1].weight.data * 1.5
    assert weights_digest(changed) != before
    assert weights_digest(model()) != weights_digest(model().bfloat16())
    one, other = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
    other.weight.data = one.weight.data.view(4, 8)
    assert weights_digest(one) != weights_digest(other)
    with pytest.raises(UserError, match=r"1.weight: the weight has no content here"):
        weights_digest(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_quantised_weights_are_their_numbers_and_scales():
    """As of a tensor that is made of two others."""

    def quantised(number=1.0, scale=0.5):
        layer = nn.Linear(2, 2, bias=False)
        weight = TwoTensor(torch.tensor([[number, 2], [3, 4]]), torch.full((2, 2), scale))
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return weights_digest(layer)

    assert quantised() == quantised()
    assert len({quantised(), quantised(number=0.0), quantised(scale=0.25)}) == 3
