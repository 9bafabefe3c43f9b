"""A training: its losses, what it leaves and refuses; killed or stopped by a signal, it goes on bit for bit."""

import hashlib
import math
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import landmark.experiment.training.optimization
from landmark.cli.terminal import reported
from landmark.experiment.data.datamodule import WindowDataModule
from landmark.experiment.training import discard_checkpoints
from landmark.experiment.training.checkpointing import SIGNALS
from landmark.experiment.training.lightning_module import LanguageModelTraining
from landmark.models import load
from landmark.utils.checkpoints import checkpoints, hash_path
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import Stopped, UserError
from landmark.utils.metrics_csv import COLUMNS, append_metrics, drop_lines_after, read_metrics
from tests.experiment.training.training_case import (
    EXTRAS,
    KINDS,
    MASKED,
    TOKENIZER,
    assert_same_weights,
    fails,
    make_config,
    make_corpus,
    make_model,
    run,
    signals,
    train_and_be_terminated,
    train_and_die,
)
from tests.together import exit_codes


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder, model and summary of a training of a kind that nothing disturbed."""
    made = {}

    def train(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, *run(make_config(kind), folder)
        return made[kind]

    return train


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_means_over_targets(kind, tmp_path, capsys):
    """The first training loss, its gradient, and the last validation loss, of a batch cut into 3 windows and 1."""
    config = make_config(kind, steps=1, micro_batch=3)
    model, summary = run(config, tmp_path)
    printed = capsys.readouterr().err  # without a terminal
    assert "run: training for 1 steps" in printed
    assert re.search(r"run: 100%.* 1/1 .*, loss \d", printed)
    data = WindowDataModule(make_corpus(tmp_path / "data"), TOKENIZER, config)

    def mean_loss(model, batches) -> float:
        batches = list(batches)
        with torch.no_grad():
            total = sum(float(loss) for batch in batches for loss, _ in model.window_losses(batch))
        return total / sum(int((batch.targets != NO_LOSS).sum()) for batch in batches)

    first = next(iter(data.train_dataloader()))
    assert summary["train_loss"] == pytest.approx(mean_loss(make_model(config), [first]), rel=1e-5)
    assert summary["validation_loss"] == pytest.approx(mean_loss(model, data.val_dataloader()), rel=1e-5)
    assert summary["validation_perplexity"] == pytest.approx(math.exp(summary["validation_loss"]))

    (row,) = read_metrics(tmp_path / "run" / "metrics.csv")
    fresh, targets = make_model(config), int((first.targets != NO_LOSS).sum())
    for loss, _ in fresh.window_losses(first):
        (loss / targets).backward()
    gradient = torch.cat([weight.grad.flatten() for weight in fresh.parameters() if weight.grad is not None])
    assert row["train/gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-4)
    assert row["train/peak_memory_bytes"] > 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_leaves_a_model(kind, finished):
    folder, model, summary = finished(kind)
    rows = read_metrics(folder / "run" / "metrics.csv")
    assert rows[0]["train/loss"] == pytest.approx(math.log(TOKENIZER.vocab_size), rel=0.05)
    assert rows[-1]["train/learning_rate"] == pytest.approx(4e-4 * (5 if kind == EXTRAS else 1))  # as much for Muon
    assert summary["validation_loss"] < rows[0]["train/loss"] - 1
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 2**20
    assert summary["mfu"] is None
    assert_same_weights(load(folder / "run"), model)


def test_a_validation_loss_that_rises_is_said_once(tmp_path, caplog):
    """Of a text that has one letter in training and others in validation, also where the training is resumed."""
    make_corpus(tmp_path / "data")
    (tmp_path / "data" / "train.bin").write_bytes(b"a\0" * 4000)
    config = make_config("transformer", validate_every=5, checkpoint_every=5, log_every=1, max_lr=1e-2)
    with pytest.raises(KeyError):
        run(config, tmp_path, [fails(32)])
    (said,) = [record.getMessage() for record in caplog.records if "validation loss rose" in record.getMessage()]
    caplog.clear()
    run(config, tmp_path)
    assert "validation loss" not in caplog.text
    step, best = map(int, re.match(r"step (\d+): .* \(step (\d+)\)", said).groups())
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run" / "metrics.csv")}
    first = next(n for n in range(best + 5, 41, 5) if rows[n]["validation/loss"] > 1.01 * rows[best]["validation/loss"])
    assert step == first
    assert rows[step]["train/loss"] < rows[best]["train/loss"]


def test_nan_stops_naming_the_step(tmp_path, monkeypatch):
    losses, calls = landmark.models.Decoder.window_losses, []

    def window_losses(self, batch):
        calls.append(1)
        for loss, count in losses(self, batch):
            yield loss * (math.nan if len(calls) == 20 else 1.0), count

    monkeypatch.setattr(landmark.models.Decoder, "window_losses", window_losses)
    config = make_config("transformer", micro_batch=None, log_every=30, validate_every=40)
    with pytest.raises(UserError) as error:
        run(config, tmp_path)
    saved = tmp_path / "run" / "checkpoints" / "step-00000016.ckpt"
    assert f"became nan at step 20; the checkpoint before it is {saved}" in str(error.value)
    assert sorted(path.name for path in saved.parent.glob("*.ckpt")) == ["step-00000008.ckpt", saved.name]
    monkeypatch.undo()
    assert run(config, tmp_path)[1]["steps"] == 40


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    """The loss of the step is finite: its update comes after it."""
    rate = landmark.experiment.training.optimization.learning_rate
    spoil = lambda step, settings: math.inf if step == 7 else rate(step, settings)  # noqa: E731
    monkeypatch.setattr(landmark.experiment.training.optimization, "learning_rate", spoil)
    with pytest.raises(UserError, match="a weight became nan at step 8; no checkpoint was written before"):
        run(make_config("transformer"), tmp_path)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


# ---- a training that was killed or has ended goes on

MEASURED = ("step", "train/loss", "train/learning_rate", "train/gradient_norm")
MEASURED += ("validation/loss", "validation/perplexity")


def measured(folder: Path) -> list[dict]:
    """What was logged, but for times."""
    rows = read_metrics(folder / "run" / "metrics.csv")
    return [{name: row[name] for name in MEASURED if name in row} for row in rows]


@pytest.fixture
def plain(finished):
    return finished("transformer")


@pytest.mark.parametrize("kind", [*KINDS, MASKED])
def test_killed_run_ends_bit_for_bit_the_same(finished, tmp_path, kind):
    folder, model, summary = finished(kind)
    died = exit_codes(1, train_and_die, kind, tmp_path, 30)  # logs and validates; the last checkpoint is of step 24
    assert died == [-signal.SIGKILL]
    resumed, resumed_summary = run(make_config(kind), tmp_path)
    assert_same_weights(model, resumed)
    assert measured(tmp_path) == measured(folder)
    assert [row["step"] for row in measured(tmp_path)] == sorted({*range(3, 41, 3), *range(10, 41, 10)})
    for name in ("steps", "train_loss", "validation_loss", "validation_perplexity"):
        assert resumed_summary[name] == summary[name]


def test_finished_run_returns_at_once(plain, monkeypatch):
    folder, model, summary = plain
    before = (folder / "run" / "metrics.csv").read_text()
    monkeypatch.setattr(LanguageModelTraining, "training_step", lambda *_: 1 / 0)
    again, summary_again = run(make_config("transformer"), folder)
    assert_same_weights(model, again)
    assert (folder / "run" / "metrics.csv").read_text() == before
    memory = "peak_memory_bytes"
    assert {**summary_again, memory: 0} == {**summary, memory: 0}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")

    with pytest.raises(KeyError):
        run(make_config("transformer"), folder, [fails(30)])
    return folder


@pytest.fixture
def interrupted(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "interrupted")


def test_the_newest_two_are_kept_and_a_damaged_one_gives_way_to_the_older(plain, interrupted, caplog):
    """tests/experiment/runs/test_records.py damages them in more ways. Hashes are as `sha256sum -c` reads them."""
    folder, model, _ = plain
    newest, older = checkpoints(interrupted / "run" / "checkpoints")
    assert (newest.name, older.name) == ("step-00000024.ckpt", "step-00000016.ckpt")
    hashes = {path.name: path.read_text() for path in newest.parent.glob("*.sha256")}
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (newest, older)}
    assert hashes == {f"{name}.sha256": f"{digest}  {name}\n" for name, digest in digests.items()}
    newest.write_bytes(newest.read_bytes()[:-1000])
    (left := newest.with_name(".step-00000032.ckpt.abc.tmp")).touch()  # of a process killed while it wrote
    resumed, _ = run(make_config("transformer"), interrupted)
    assert "step-00000024.ckpt is cut short or altered, trying an older checkpoint" in caplog.text
    assert_same_weights(model, resumed)
    assert measured(interrupted) == measured(folder)
    assert not left.exists()
    for _ in range(2):
        discard_checkpoints(interrupted / "run")
        assert not newest.parent.exists()


class Malicious:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return Path.mkdir, (self.folder,)


def test_checkpoints_of_another_configuration_and_those_that_would_run_code_are_refused(interrupted):
    with pytest.raises(UserError, match=r"train\.max_lr: 0\.001 here, 0\.002 there"):
        run(make_config("transformer", max_lr=1e-3), interrupted)
    # Even with the right hash beside it.
    proof = interrupted / "executed"
    for path in checkpoints(interrupted / "run" / "checkpoints"):
        torch.save({**torch.load(path, weights_only=True), "extra": Malicious(proof)}, path)
        hash_path(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    with pytest.raises(UserError, match=r"step-00000024\.ckpt is cut short or altered, and no older"):
        run(make_config("transformer"), interrupted)
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists()


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({"checkpoint_every": 5, "log_every": 7, "validate_every": 9}, 0), ({"micro_batch": 1}, 1e-4)],
)
def test_cadences_and_micro_batches_may_change_on_resumption(plain, interrupted, changes, tolerance):
    """With micro-batches steps have another number of parts: no step is lost, and sums are rounded in another way."""
    folder, model, _ = plain
    resumed, summary = run(make_config("transformer", **changes), interrupted)
    assert summary["steps"] == 40
    if "micro_batch" in changes:
        assert [row["step"] for row in measured(interrupted)] == [row["step"] for row in measured(folder)]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, rtol=0, atol=tolerance)


def test_a_line_cut_short_is_dropped_and_a_file_of_fewer_columns_is_gone_on_with(tmp_path):
    path = tmp_path / "run" / "metrics.csv"
    path.parent.mkdir()
    path.write_text("step,train/loss,validation/loss\n1,2,\n2,1.5,1.25\n3,1")
    first = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.5, "validation/loss": 1.25}]
    assert read_metrics(path) == first
    drop_lines_after(path, 2)
    append_metrics(path, 3, {"train/gradient_norm": 0.5})
    assert read_metrics(path) == [*first, {"step": 3, "train/gradient_norm": 0.5}]
    drop_lines_after(path, 0)  # a new run starts a new file
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    path.parent.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"metrics\.csv cannot be written, its folder was moved or deleted"):
        append_metrics(path, 1, {"train/loss": 2.0})


# ---- a training that a signal or Ctrl-C ends with a checkpoint, or that goes on where a launcher's handler says so


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """A shell starts its background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def newest(folder):
    return checkpoints(folder / "run" / "checkpoints")[0].name


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_after_a_checkpoint(tmp_path, plain, number, capsys, monkeypatch):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=str(128 + number)) as stop, reported():
        run(make_config("transformer"), tmp_path, [signals(number, 15)])
    assert newest(tmp_path) == "step-00000015.ckpt"
    assert f"stopped by {number.name}, {tmp_path}/run/checkpoints/step-00000015.ckpt is written" in stop.value.message
    assert stop.value.message in capsys.readouterr().err
    assert signal.getsignal(number) == before
    if number == SIGNALS[0]:
        clock = iter(range(2_000_000_000, 0, -3600))
        monkeypatch.setattr(time, "time", lambda: float(next(clock)))  # it goes backwards
        model, summary = run(make_config("transformer"), tmp_path)
        assert_same_weights(model, plain[1])
        assert summary["seconds"] > 0
        assert all(row.get("train/tokens_per_second", 1) > 0 for row in read_metrics(tmp_path / "run" / "metrics.csv"))


def test_a_second_interrupt_stops_at_once(tmp_path):
    """Without a checkpoint: the newest is the last regular one."""
    with pytest.raises(SystemExit) as stop:
        run(make_config("transformer"), tmp_path, [signals(signal.SIGINT, 15)] * 2)
    assert not isinstance(stop.value, Stopped)
    assert stop.value.code == 1  # Lightning's, of an interrupt: the program makes one of it again
    assert newest(tmp_path) < "step-00000015.ckpt"


def test_an_ignored_interrupt_is_ignored_without_a_word(tmp_path, plain, capfd):
    """As in a job in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model, _ = run(make_config("transformer"), tmp_path, [signals(signal.SIGINT, 15)])
    assert "Ctrl-C" not in capfd.readouterr().err
    assert_same_weights(model, plain[1])


def test_a_launchers_handler_is_called_after_the_checkpoint(tmp_path, plain):
    """One that returns, as submitit's for SIGTERM does, lets the training go on."""
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(newest(tmp_path)))
    try:
        model, _ = run(make_config("transformer"), tmp_path, [signals(signal.SIGTERM, 15)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == ["step-00000015.ckpt"]
    assert_same_weights(model, plain[1])


def test_two_processes_stop_at_the_same_step(tmp_path):
    assert exit_codes(2, train_and_be_terminated, "transformer", tmp_path, 14) == [128 + signal.SIGTERM] * 2
    assert newest(tmp_path) == "step-00000015.ckpt"
