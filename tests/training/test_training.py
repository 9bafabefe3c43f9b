import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import landmark.training.optimization
from landmark.data.datamodule import WindowDataModule
from landmark.models import checkpoint
from landmark.training.progress_callback import ProgressCallback
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.metrics_csv import read_metrics
from landmark.utils.progress import new_bar
from tests.training.training_case import EXTRAS, KINDS, TOKENIZER, make_config, make_corpus, make_model, run


def weights(model) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_means_over_targets(kind, tmp_path, capsys):
    """An independent computation of the first training loss, of its gradient, and of the last validation loss.

    However a batch of four windows is cut: here into three and one.
    """
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
    assert torch.equal(weights(checkpoint.load(folder / "run")), weights(model))


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
    rate = landmark.training.optimization.learning_rate
    spoil = lambda step, settings: math.inf if step == 7 else rate(step, settings)  # noqa: E731
    monkeypatch.setattr(landmark.training.optimization, "learning_rate", spoil)
    with pytest.raises(UserError, match="a weight became nan at step 8; no checkpoint was written before"):
        run(make_config("transformer"), tmp_path)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("devices", 2, "must be started by torchrun"), ("accelerator", "gpu", "trainer: No supported gpu backend found")],
)
def test_devices_that_are_not_there_are_refused(key, value, said, tmp_path):
    config = make_config("transformer")
    setattr(config.trainer, key, value)
    with pytest.raises(UserError, match=said):
        run(config, tmp_path)


def bar_of_a_training():
    shown = ProgressCallback(SimpleNamespace(steps=9), "reading")  # pyright: ignore[reportArgumentType]
    shown.on_train_start(SimpleNamespace(global_step=0, is_global_zero=True), None)  # pyright: ignore
    return shown._bar


@pytest.mark.parametrize("make", [bar_of_a_training, lambda: new_bar("reading")])
def test_a_terminal_that_says_it_has_no_size_shows_progress(make, monkeypatch):
    """As a new pseudo-terminal does."""
    ours, terminal = os.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        bar = make()
        bar.delay = 0
        bar.refresh()
        assert b"reading" in os.read(ours, 1000)
        bar.close()
    os.close(ours)
