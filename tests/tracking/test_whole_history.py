"""A training that is killed and goes on has each point once: offline in one file, online at W&B."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from landmark.tracking.whole_history import discard_attempts
from landmark.utils.metrics_csv import read_metrics
from tests.tracking.offline import read_offline
from tests.tracking.wandb_server import Server

ROOT = Path(__file__).parents[2]
TINY = [
    *("data=stdlib", "data.max_documents=6", "model=transformer", "size=nano", "tokenizer=bytes", "trainer=cpu"),
    *("trainer.threads=1", "model.num_layers=1", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=8", "train.batch_size=2", "train.length=64", "train.log_every=1", "train.checkpoint_every=3"),
    *("train.validate_every=4", "train.validate_batches=1", "task=train"),
]
KILLED = """
import os, signal
from landmark.cli.main import main
from landmark.training.progress_callback import ProgressCallback

def die(self, trainer, module, outputs, batch, batch_idx):
    if trainer.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

ProgressCallback.on_train_batch_end = die
main()
"""


def start(output, *program, mode="offline", **variables):
    command = [sys.executable, *program, *TINY, f"logger.mode={mode}", f"output={output}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


def test_a_killed_training_has_each_point_once(tmp_path):
    assert start(tmp_path, "-c", KILLED).returncode == -signal.SIGKILL
    done = start(tmp_path, "run.py")
    assert done.returncode == 0, done.stderr
    assert "going on at step 3" in done.stderr
    (run,) = [run for run in read_offline(tmp_path) if run.job_type == "train"]
    assert run.series("trainer/global_step") == list(range(1, 9))
    (file,) = tmp_path.glob("runs/*/metrics.csv")
    expected = read_metrics(file)
    assert [row["train/loss"] for row in expected] == pytest.approx(run.series("train/loss"))
    assert [row["validation/loss"] for row in expected[3::4]] == pytest.approx(run.series("validation/loss"))


@pytest.mark.parametrize("arrived", [2, 5])
def test_a_killed_training_goes_on_online_with_each_point_once(tmp_path, arrived):
    """Whether fewer points had arrived than the checkpoint at step 3 has seen, or more. W&B is one on this machine."""
    lost, server = Server(), Server()
    variables = {"mode": "online", "WANDB_API_KEY": "x" * 40}
    assert start(tmp_path, "-c", KILLED, **variables, WANDB_BASE_URL=lost.url).returncode == -signal.SIGKILL
    lost.go_away()
    server.history = [{"_step": step, "trainer/global_step": step, "earlier": 1} for step in range(1, arrived + 1)]
    done = start(tmp_path, "run.py", **variables, WANDB_BASE_URL=server.url)
    server.go_away()
    assert done.returncode == 0, done.stderr
    assert "going on at step 3" in done.stderr
    assert [line["trainer/global_step"] for line in server.history] == list(range(1, 9))
    assert ["earlier" in line for line in server.history] == [step <= arrived for step in range(1, 9)]


@pytest.mark.parametrize("state", ["offline", "uploaded", "online", "of another run"])
def test_what_was_uploaded_stays(tmp_path, state):
    name = {"online": "run-1-abc", "of another run": "offline-run-1-def"}.get(state, "offline-run-1-abc")
    folder = tmp_path / "wandb" / name
    folder.mkdir(parents=True)
    (folder / "run-abc.wandb").touch()
    if state == "uploaded":
        (folder / "run-abc.wandb.synced").touch()
    assert discard_attempts(tmp_path, "abc") is (state in ("offline", "of another run"))
    assert folder.exists() is (state != "offline")
