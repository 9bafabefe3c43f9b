import pytest

from landmark.config.checks import beyond_training, resolve
from landmark.experiment.jobs import check


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"model={model}", "data.repeats=[1]"] for model in ("transformer", "landmark", "transformer_xl")),
        *([f"data.repeats={shares}"] for shares in ("[0]", "[0.5]", "[1,1,0.5,0.5,0.2]", "null")),
        ["model=transformer", "data.repeats=[1]", "train.length=15"],  # room for a repeat at any start
        ["model.block_size=3", "data.repeats=[1]", "train.length=20"],  # beginning with a landmark
        ["size=nano", "eval.task=copy", "eval.length=8192"],  # a probe reads no spans and may be longer
        ["model=transformer", "eval.local=360", "eval.length=360"],
        ["model=transformer", "eval.local=360", "memory.window=148"],
        ["eval.length=2048", "eval.task=unique_blocks"],
        ["model=transformer", "memory.blocks=3"],  # settings of another model do not matter
        ["size=paper", "eval.length=8192"],  # the whole split needs no span
        ["retrieval.k=0"],
    ],
)
def test_what_goes_together_is_accepted(configure, overrides):
    check(configure(*overrides))


@pytest.mark.parametrize(
    ("overrides", "local"),
    [
        (["model=transformer", "eval.length=512"], 512),
        (["model=transformer", "eval.length=2048", "memory.window=256"], 256),
        (["model=landmark", "eval.length=2048"], 250),
        (["model=landmark", "eval.length=100"], 100),
        (["model=transformer_xl", "eval.length=2048"], 256),
    ],
)
def test_what_is_fed_at_a_time_if_left_open(configure, overrides, local):
    assert resolve(configure(*overrides)).eval.local == local


def test_true_positions_beyond_training_are_warned_of(configure):
    jumps = ["positions=jumps", "positions.mapping=true", "eval.local=250"]
    warning = beyond_training(configure(*jumps, "eval.length=2048"))
    assert warning is not None
    assert "eval.length=2048 reaches position 2,088, training at most 1,601" in warning
    assert beyond_training(configure(*jumps, "eval.length=1500")) is None
    assert beyond_training(configure("positions.mapping=true", "eval.length=600")) is not None
    assert beyond_training(configure("eval.length=2048")) is None
