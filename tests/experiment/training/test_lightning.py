"""Lightning's Trainer from the command line: its arguments, callbacks, loggers and profilers."""

import inspect
import re

import lightning
import pytest

from landmark.experiment.config.schema import ELSEWHERE, PASSED_ON
from landmark.experiment.runs.identity import run_settings
from landmark.utils.files import read_json
from tests.cli.shell import start
from tests.configurations import SMALL

WORDS = ["data=documents", "data.path=books", "tokenizer=bytes", "size=nano", "model=transformer", "task=train", *SMALL]


@pytest.fixture
def train(tmp_path):
    """Trainings on a short book in a folder."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    return lambda *words: start(tmp_path, *WORDS, *words)


def test_every_argument_of_the_trainer_is_passed_on_or_named():
    arguments = {*inspect.signature(lightning.Trainer).parameters}
    assert arguments == {*PASSED_ON, *ELSEWHERE, "accelerator", "strategy", "devices"}


def test_callbacks_loggers_and_a_profiler_work(train, tmp_path):
    mine = "+logger.mine={_target_: lightning.pytorch.loggers.CSVLogger, name: '', version: mine}"
    done = train(
        "callbacks=learning_rate_monitor", mine, "trainer.profiler=simple", "trainer.enable_model_summary=true"
    )
    assert done.code == 0, done
    assert "FIT Profiler Report" in done.out + done.err
    assert "Total params" in done.out + done.err
    (logged,) = tmp_path.glob("outputs/runs/*/mine/metrics.csv")
    assert {"train/loss", "validation/loss"} <= set(logged.read_text().splitlines()[0].split(","))
    refused = train("+callbacks.mine._target_=nowhere.Callback", "seed=1")
    assert (refused.code, refused.err.splitlines()[-1][:24]) == (2, "error: callbacks.mine: E"), refused


def test_early_stopping_ends_a_training_which_then_is_whole(train, tmp_path):
    often = ("train.steps=50", "train.validate_every=1", "train.log_every=10", "callbacks.early_stopping.patience=1")
    words = (*often, "callbacks=early_stopping", "+callbacks.early_stopping.min_delta=100")
    done = train(*words)
    assert done.code == 0, done
    (record,) = (tmp_path / "outputs" / "records" / "runs").iterdir()
    results = read_json(record)["results"]
    assert results["steps"] == 2
    assert results["train_loss"] > 0
    assert "trained before" in train(*words).out


def test_max_time_ends_with_a_checkpoint_from_which_the_same_command_goes_on(train, tmp_path):
    words = ("train.steps=6", "train.validate_every=6")
    stopped = train(*words, "+trainer.max_time={seconds: 0.000001}")
    assert stopped.code == 124, stopped
    said = "stopped by trainer.max_time, .*outputs/runs/.*step-00000001.ckpt is written: the same command goes on"
    assert re.search(said, stopped.err)
    assert not list((tmp_path / "outputs" / "records" / "runs").glob("*"))
    again = train(*words, "trainer.max_time=00:01:00:00")
    assert again.code == 0, again
    assert "going on at step 1" in again.err


def test_what_decides_weights_decides_the_identity_and_what_watches_does_not(configure):
    plain = run_settings(configure(), "tokenizer", "stream")
    target = "_target_: lightning.pytorch.callbacks"
    for words in ("+trainer.max_time=00:01:00:00", "trainer.detect_anomaly=true", "callbacks=learning_rate_monitor"):
        assert run_settings(configure(words), "tokenizer", "stream") == plain
    for words in (
        "trainer.gradient_clip_val=0.5",
        f"+callbacks.mine={{{target}.StochasticWeightAveraging, swa_lrs: 1}}",
    ):
        assert run_settings(configure(words), "tokenizer", "stream") != plain
