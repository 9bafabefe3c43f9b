import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import landmark
from landmark.data.datamodule import WindowDataModule
from landmark.data.windows import NO_LOSS
from landmark.errors import UserError
from landmark.models import checkpoint
from landmark.training.metrics import read_metrics
from tests.training.training_case import KINDS, TOKENIZER, make_config, make_corpus, make_model, run

ROOT = Path(__file__).parents[2]


def weights(model) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def change(model, config) -> torch.Tensor:
    return weights(model) - weights(make_model(config))


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_do_not_change_the_training(kind, tmp_path):
    configs = [make_config(kind, steps=3, micro_batch=size) for size in (None, 1, 3)]
    whole, *cut = [change(run(c, tmp_path / str(c.train.micro_batch))[0], c) for c in configs]
    for other in cut:
        assert (other - whole).norm() < 1e-3 * whole.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_means_over_targets(kind, tmp_path):
    """An independent computation of the first training loss, of its gradient, and of the last validation loss."""
    config = make_config(kind, steps=1)
    model, summary = run(config, tmp_path)
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
def test_it_learns_and_leaves_a_model(kind, tmp_path):
    config = make_config(kind)
    model, summary = run(config, tmp_path)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert rows[0]["train/loss"] == pytest.approx(math.log(TOKENIZER.vocab_size), rel=0.05)
    assert summary["validation_loss"] < rows[0]["train/loss"] - 1
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 2**20
    assert summary["mfu"] is None
    loaded = checkpoint.load(tmp_path / "run")
    assert torch.equal(weights(loaded), weights(model))


def test_learning_rate_reaches_its_end(tmp_path):
    run(make_config("transformer"), tmp_path)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert rows[-1]["train/learning_rate"] == pytest.approx(4e-4)


def test_bfloat16_runs(tmp_path):
    _, summary = run(make_config("landmark", steps=4, precision="bf16-mixed"), tmp_path)
    assert math.isfinite(summary["validation_loss"])


@pytest.mark.parametrize(("name", "action"), [("simple", "training_step"), ("pytorch", "aten::mm")])
def test_profiler_reports_into_the_run(tmp_path, name, action):
    config = make_config("transformer", steps=6)
    config.trainer.profiler = name
    reports = []
    for attempt in range(4):  # now and then PyTorch's profiler loses all events of a busy machine
        run(config, tmp_path / str(attempt))
        reports.append((tmp_path / str(attempt) / "run" / f"fit-profile-{name}.txt").read_text())
        if action in reports[-1]:
            return
    pytest.fail(f"no {action} in {reports}")


def test_nan_stops_naming_the_step(tmp_path, monkeypatch):
    losses, calls = landmark.models.Decoder.window_losses, []

    def window_losses(self, batch):
        calls.append(1)
        for loss, count in losses(self, batch):
            yield loss * (math.nan if len(calls) == 20 else 1.0), count

    monkeypatch.setattr(landmark.models.Decoder, "window_losses", window_losses)
    with pytest.raises(UserError, match=r"the loss became nan at step 20: lower train\.max_lr"):
        run(make_config("transformer", micro_batch=None, log_every=30, validate_every=40), tmp_path)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000008.ckpt", "step-00000016.ckpt"]


def test_progress_is_shown_without_a_terminal(tmp_path, capsys):
    run(make_config("transformer"), tmp_path)
    printed = capsys.readouterr().err
    assert "run: training for 40 steps" in printed
    assert "run: step 40/40  loss " in printed
    assert "0:00 left" in printed


def test_two_processes_train_as_one(tmp_path):
    """Gradients are added over devices, and synchronised only at the last of a step's windows."""
    kind = "transformer_xl"
    config = make_config(kind)
    alone, summary = run(config, tmp_path / "alone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.training.training_case", kind, str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    together, expected = change(checkpoint.load(tmp_path / "two" / "run"), config), change(alone, config)
    assert (together - expected).norm() < 1e-2 * expected.norm()
    ours, theirs = (read_metrics(tmp_path / name / "run" / "metrics.csv") for name in ("two", "alone"))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for name in ("train/loss", "train/gradient_norm"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-4)
    assert ours[-1]["validation/loss"] == pytest.approx(summary["validation_loss"], rel=1e-4)


def test_several_devices_without_torchrun_are_refused(tmp_path):
    config = make_config("transformer")
    config.trainer.devices = 2
    with pytest.raises(UserError, match="must be started by torchrun"):
        run(config, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none_is_refused(tmp_path):
    config = make_config("transformer")
    config.trainer.name = config.trainer.accelerator = "gpu"
    with pytest.raises(UserError, match="trainer=gpu: No supported gpu backend found"):
        run(config, tmp_path)
