"""A training that a signal or Ctrl-C ends with a checkpoint, or that goes on where a launcher's handler says so."""

import os
import signal
import time

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from landmark.cli.terminal import reported
from landmark.training.checkpointing import SIGNALS, checkpoints
from landmark.utils.errors import Stopped
from tests.together import exit_codes
from tests.training.training_case import assert_same_weights, make_config, run, signals, train_and_be_terminated


@pytest.fixture
def expected(finished):
    return finished("transformer")[1]


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """A shell starts its background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def newest(folder):
    return checkpoints(folder / "run" / "checkpoints")[0].name


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_after_a_checkpoint(tmp_path, expected, number, capsys):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=str(128 + number)) as stop, reported():
        run(make_config("transformer"), tmp_path, [signals(number, 15)])
    assert newest(tmp_path) == "step-00000015.ckpt"
    assert f"stopped by {number.name}, {tmp_path}/run/checkpoints/step-00000015.ckpt is written" in stop.value.message
    assert stop.value.message in capsys.readouterr().err
    assert signal.getsignal(number) == before
    if number == SIGNALS[0]:
        model, _ = run(make_config("transformer"), tmp_path)
        assert_same_weights(model, expected)


def test_a_second_interrupt_stops_at_once(tmp_path):
    """Without a checkpoint: the newest is the last regular one."""
    with pytest.raises(SystemExit) as stop:
        run(make_config("transformer"), tmp_path, [signals(signal.SIGINT, 15)] * 2)
    assert not isinstance(stop.value, Stopped)
    assert stop.value.code == 1  # Lightning's, of an interrupt: the program makes one of it again
    assert newest(tmp_path) < "step-00000015.ckpt"


def test_an_ignored_interrupt_is_ignored_without_a_word(tmp_path, expected, capfd):
    """As in a job in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model, _ = run(make_config("transformer"), tmp_path, [signals(signal.SIGINT, 15)])
    assert "Ctrl-C" not in capfd.readouterr().err
    assert_same_weights(model, expected)


def test_a_launchers_handler_is_called_after_the_checkpoint(tmp_path, expected):
    """One that returns, as submitit's for SIGTERM does, lets the training go on."""
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(newest(tmp_path)))
    try:
        model, _ = run(make_config("transformer"), tmp_path, [signals(signal.SIGTERM, 15)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == ["step-00000015.ckpt"]
    assert_same_weights(model, expected)


def test_two_processes_stop_at_the_same_step(tmp_path):
    assert exit_codes(2, train_and_be_terminated, "transformer", tmp_path, 14) == [128 + signal.SIGTERM] * 2
    assert newest(tmp_path) == "step-00000015.ckpt"


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, expected, monkeypatch):
    """Neither durations nor which checkpoint is the newest: its file is the oldest here."""
    clock = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    with pytest.raises(Stopped):
        run(make_config("transformer"), tmp_path, [signals(signal.SIGTERM, 21)])
    for age, path in enumerate(checkpoints(tmp_path / "run" / "checkpoints")):
        os.utime(path, (1e9 + age, 1e9 + age))
    logged = []

    class Log(DummyLogger):
        def log_metrics(self, metrics, step=None, **_):
            logged.append((step, metrics))

    model, summary = run(make_config("transformer"), tmp_path, [Log()])
    assert logged[0][0] == 24  # it went on at step 21
    assert summary["seconds"] > 0
    assert all(metrics.get("train/tokens_per_second", 1) > 0 for _, metrics in logged)
    assert_same_weights(model, expected)
