"""`landmark.load`: text in, text out."""

import pytest
import torch

import landmark
from landmark.config import to_config
from landmark.config.saved import write_launch
from landmark.data import load_tokenizer
from landmark.models import Decoder, save
from landmark.utils.errors import UserError
from landmark.utils.files import write_json
from tests.configurations import compose_conf, decoder_config


def run_of(folder, name):
    tokenizer = load_tokenizer(name)
    torch.manual_seed(0)
    shape = decoder_config("landmark", tokenizer.vocab_size, 1, 2, 8, 32, landmark_id=tokenizer.landmark, block_size=20)
    save(Decoder(shape), folder)
    write_json(folder / "run.json", {"tokenizer": tokenizer.hash})
    return tokenizer


@pytest.mark.parametrize("name", ["bytes", "code"])
def test_a_run_has_its_tokenizer(tmp_path, name):
    expected = run_of(tmp_path, name)
    write_launch(tmp_path, to_config(compose_conf([f"tokenizer={name}"])))
    model, tokenizer = landmark.load(tmp_path)
    assert tokenizer.hash == expected.hash
    (ids,) = model.generate([tokenizer.encode("def main(")], 5)
    assert isinstance(tokenizer.decode(ids), str)
    assert len(ids) == 5


def test_another_tokenizer_than_the_runs_is_refused(tmp_path):
    run_of(tmp_path, "bytes")
    write_launch(tmp_path, to_config(compose_conf(["tokenizer=code"])))
    with pytest.raises(UserError, match="tokenizer code.* is not the one that the run was trained with"):
        landmark.load(tmp_path)


def test_a_run_that_does_not_say_is_refused(tmp_path):
    run_of(tmp_path, "bytes")
    write_json(tmp_path / "run.json", {"tokenizer": "0" * 64})
    with pytest.raises(UserError, match="does not say which tokenizer"):
        landmark.load(tmp_path)
