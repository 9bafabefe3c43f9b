"""`landmark.load`: text in, text out."""

import pytest

import landmark
from landmark.experiment.config import to_config
from landmark.experiment.data import load_tokenizer
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.saved import saved_run


def run_of(folder, name, noted=None):
    """noted: the tokenizer that its launch.json names."""
    saved_run(folder, config=to_config(compose_conf([f"tokenizer={noted or name}"])), tokenizer=name)
    return load_tokenizer(name)


@pytest.mark.parametrize("name", ["bytes", "code"])
def test_a_run_has_its_tokenizer(tmp_path, name):
    expected = run_of(tmp_path, name)
    model, tokenizer = landmark.load(tmp_path)
    assert tokenizer.hash == expected.hash
    (ids,) = model.generate([tokenizer.encode("def main(")], 5)
    assert isinstance(tokenizer.decode(ids), str)
    assert len(ids) == 5


def test_another_tokenizer_than_the_runs_and_a_run_that_does_not_say_are_refused(tmp_path):
    run_of(tmp_path / "other", "bytes", noted="code")
    with pytest.raises(UserError, match="tokenizer code.* is not the one that the run was trained with"):
        landmark.load(tmp_path / "other")
    saved_run(tmp_path / "silent")
    with pytest.raises(UserError, match="does not say which tokenizer"):
        landmark.load(tmp_path / "silent")
