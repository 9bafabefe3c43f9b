import hashlib
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

import landmark.training.lightning_module
from landmark.training import discard_checkpoints
from landmark.training.checkpointing import checkpoint_path, checkpoints, hash_path
from landmark.utils.errors import UserError
from landmark.utils.metrics_csv import read_metrics
from tests.together import exit_codes
from tests.training.training_case import KINDS, MASKED, make_config, run, train_and_die

MEASURED = (
    "step",
    "train/loss",
    "train/learning_rate",
    "train/gradient_norm",
    "validation/loss",
    "validation/perplexity",
)


def train_until_killed(kind: str, folder: Path, event: str, step: int) -> None:
    assert exit_codes(1, train_and_die, kind, folder, event, step) == [-signal.SIGKILL]


def measured(folder: Path) -> list[dict]:
    """What was logged, but for times."""
    rows = read_metrics(folder / "run" / "metrics.csv")
    return [{name: row[name] for name in MEASURED if name in row} for row in rows]


def assert_same_weights(a, b) -> None:
    for name, weight in a.state_dict().items():
        assert torch.equal(weight, b.state_dict()[name]), name


@pytest.fixture(scope="module", params=(*KINDS, MASKED))
def uninterrupted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model, summary = run(make_config(request.param), folder)
    return request.param, folder, model, summary


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model, summary = run(make_config("transformer"), folder)
    return folder, model, summary


def test_killed_run_ends_bit_for_bit_the_same(uninterrupted, tmp_path):
    kind, folder, model, summary = uninterrupted
    train_until_killed(kind, tmp_path, "log", 30)  # logs and validates; the last checkpoint is of step 24
    resumed, resumed_summary = run(make_config(kind), tmp_path)
    assert_same_weights(model, resumed)
    assert measured(tmp_path) == measured(folder)
    assert [row["step"] for row in measured(tmp_path)] == sorted({*range(3, 41, 3), *range(10, 41, 10)})
    for name in ("steps", "train_loss", "validation_loss", "validation_perplexity"):
        assert resumed_summary[name] == summary[name]


def test_killed_while_writing_a_checkpoint(plain, tmp_path):
    folder, model, _ = plain
    train_until_killed("transformer", tmp_path, "save", 24)
    assert list((tmp_path / "run" / "checkpoints").glob(".*.tmp"))
    resumed, _ = run(make_config("transformer"), tmp_path)
    assert_same_weights(model, resumed)
    assert measured(tmp_path) == measured(folder)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*.tmp"))


def test_finished_run_returns_at_once(plain, monkeypatch):
    folder, model, summary = plain
    before = (folder / "run" / "metrics.csv").read_text()

    def no_step(*args):
        raise AssertionError("a finished run trained on")

    monkeypatch.setattr(landmark.training.lightning_module.LanguageModelTraining, "training_step", no_step)
    again, summary_again = run(make_config("transformer"), folder)
    assert_same_weights(model, again)
    assert (folder / "run" / "metrics.csv").read_text() == before
    memory = "peak_memory_bytes"
    assert {**summary_again, memory: 0} == {**summary, memory: 0}


def interrupted(folder: Path, step: int = 30, **changes) -> None:
    """Leave a run that an error stopped at `step`."""

    class Stop(DummyLogger):
        def log_metrics(self, metrics, step_now=None, **_):
            if step_now == step:
                raise KeyError("stop")

    with pytest.raises(KeyError):
        run(make_config("transformer", **changes), folder, [Stop()])


def test_keeps_the_newest_two(tmp_path):
    interrupted(tmp_path)
    found = checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == ["step-00000024.ckpt", "step-00000016.ckpt"]
    discard_checkpoints(tmp_path / "run")
    discard_checkpoints(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_hash(path: Path) -> None:
    hash_path(path).unlink()


@pytest.mark.parametrize("damage", [cut_short, alter, lose_hash])
def test_damaged_checkpoint_gives_way_to_the_older_one(plain, tmp_path, damage, caplog):
    folder, model, _ = plain
    interrupted(tmp_path)
    damage(checkpoint_path(tmp_path / "run" / "checkpoints", 24))
    resumed, _ = run(make_config("transformer"), tmp_path)
    assert "step-00000024.ckpt is cut short or altered, trying an older checkpoint" in caplog.text
    assert_same_weights(model, resumed)
    assert measured(tmp_path) == measured(folder)


def test_no_whole_checkpoint_is_an_error(tmp_path):
    interrupted(tmp_path)
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        cut_short(path)
    with pytest.raises(UserError, match=r"step-00000024\.ckpt is cut short or altered, and no older"):
        run(make_config("transformer"), tmp_path)


def test_hash_is_as_others_check_it(tmp_path):
    interrupted(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    (newest, *_) = checkpoints(folder)
    digest = hashlib.sha256(newest.read_bytes()).hexdigest()
    assert hash_path(newest).read_text() == f"{digest}  {newest.name}\n"
    assert {path.name for path in folder.glob("*.sha256")} == {f"{path.name}.sha256" for path in checkpoints(folder)}


class Malicious:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return Path.mkdir, (self.folder,)


def test_checkpoint_that_would_run_code_is_refused(tmp_path):
    """Even with the right hash beside it."""
    interrupted(tmp_path)
    proof = tmp_path / "executed"
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        torch.save({**torch.load(path, weights_only=True), "extra": Malicious(proof)}, path)
        hash_path(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    with pytest.raises(UserError, match=r"step-00000024\.ckpt is cut short or altered, and no older"):
        run(make_config("transformer"), tmp_path)
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists()


def test_checkpoint_of_another_configuration(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(UserError, match=r"train\.max_lr: 0\.001 here, 0\.002 there"):
        run(make_config("transformer", max_lr=1e-3), tmp_path)


def test_cadences_may_change_on_resumption(plain, tmp_path):
    _, model, _ = plain
    interrupted(tmp_path)
    resumed, _ = run(make_config("transformer", checkpoint_every=5, log_every=7, validate_every=9), tmp_path)
    assert_same_weights(model, resumed)


def test_checkpoint_of_manual_optimisation(plain, tmp_path):
    """As all were once: to Lightning a batch was a step, and only manual steps were counted."""
    folder, model, _ = plain
    interrupted(tmp_path)
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        checkpoint = torch.load(path, weights_only=True)
        step, loops = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
        steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        for span in ("total", "current"):
            seen = {"ready": step, "started": step, "processed": step, "completed": step - 1}
            loops["epoch_loop.batch_progress"][span] = seen
            steps[span] = {"ready": 0, "completed": 0}
            loops["epoch_loop.manual_optimization.optim_step_progress"][span] = {"ready": step, "completed": step}
        torch.save(checkpoint, path)
        hash_path(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    resumed, _ = run(make_config("transformer"), tmp_path)
    assert_same_weights(model, resumed)
    assert measured(tmp_path) == measured(folder)


def test_micro_batches_may_change_on_resumption(plain, tmp_path):
    """Steps then have another number of parts: no step is lost, and sums are rounded in another way."""
    folder, model, _ = plain
    interrupted(tmp_path)
    resumed, summary = run(make_config("transformer", micro_batch=1), tmp_path)
    assert summary["steps"] == 40
    assert [row["step"] for row in measured(tmp_path)] == [row["step"] for row in measured(folder)]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, rtol=0, atol=1e-4)
