"""Weights that were altered, and weights that are no numbers."""

import hashlib
import json

import pytest
from safetensors.torch import load_file, save_file

from landmark.models import load
from landmark.utils.errors import UserError
from landmark.utils.files import HASHES
from tests.saved import hash_again
from tests.training.training_case import make_config, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(make_config("transformer", steps=2), folder)
    return folder / "run"


@pytest.fixture
def folder(trained, tmp_path):
    for name in ("config.json", "model.safetensors", HASHES):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    return tmp_path


def test_a_training_leaves_the_hash_of_its_weights(trained):
    lines = (trained / HASHES).read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["config.json", "model.safetensors"]
    load(trained)


def test_bytes_that_became_zero_are_noticed(folder):
    load(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"model\.safetensors is damaged, its SHA-256 differs from weights\.sha256: dele"
    ):
        load(folder)


def test_a_file_is_hashed_once(folder, monkeypatch):
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file) or digest(file, name))
    load(folder)
    load(folder)
    assert len(hashed) == 2  # configuration and weights


@pytest.mark.parametrize("hashes", ["", "missing", "folder", "0" * 64 + "  model.safetensors\n", "shorter"])
def test_a_hash_that_is_not_there_is_a_wrong_one(folder, hashes):
    path = folder / HASHES
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()
    if hashes == "folder":
        path.mkdir()
    elif hashes != "missing":
        path.write_text(lines[0] if hashes == "shorter" else hashes)
    with pytest.raises(UserError, match=r"weights\.sha256.*: delete the folder and train again"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(folder, value):
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] = value
    save_file(weights, folder / "model.safetensors")
    hash_again(folder)
    with pytest.raises(UserError, match=r"the weight norm\.weight has values that are not finite"):
        load(folder)


@pytest.mark.parametrize("content", [None, [], 3, {"num_layers": "two"}, "{"])
def test_a_damaged_configuration_is_one_line(folder, content):
    text = content if content == "{" else json.dumps(content)
    if isinstance(content, dict):
        text = json.dumps(json.loads((folder / "config.json").read_text()) | content)
    (folder / "config.json").write_text(text)
    hash_again(folder)
    with pytest.raises(UserError, match=r"config\.json"):
        load(folder)
