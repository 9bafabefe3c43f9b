"""A table that is killed and started again ends with the numbers of one that was left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = [
    "+experiment=quickstart",
    "data.max_documents=6",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.mlp_dim=32",
    "train.steps=40",
    "train.batch_size=2",
    "train.checkpoint_every=6",
    "train.validate_every=20",
    "train.validate_batches=1",
    "train.log_every=4",
    "trainer.threads=1",
    "eval.tokens=8192",
]
TIMINGS = {"seconds", "seconds_searching", "seconds_waited", "tokens_per_second", "peak_memory_bytes", "mfu"}


def start(output: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "run.py", *TINY, f"output={output}", "trainer=cpu", *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(output: Path, *more: str) -> str:
    process = start(output, *more)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return text


def kill_when(output: Path, reached) -> None:
    process = start(output, "logger=csv")
    deadline = time.monotonic() + 120
    while process.poll() is None and not reached() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, f"it ended before it could be killed: {process.communicate()[0]}"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def results(output: Path) -> dict:
    found = {}
    for path in sorted((output / "records").rglob("*.json")):
        record = json.loads(path.read_text())
        found[path.name] = without_timings(record["results"])
    return found


def without_timings(found: object) -> object:
    if not isinstance(found, dict):
        return found
    return {key: without_timings(value) for key, value in found.items() if key not in TIMINGS}


def test_killed_and_started_again(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    text = finish(whole)
    assert "landmark_2048_recent" in text
    assert list((whole / "wandb").glob("offline-run-*")), "W&B keeps its logs offline where no key is configured"

    kill_when(broken, lambda: list(broken.glob("data/**/*.lock")))
    kill_when(broken, lambda: list(broken.glob("runs/transformer-*/checkpoints/step-*12.ckpt")))
    kill_when(broken, lambda: list(broken.glob("records/rows/*.json")))
    kill_when(broken, lambda: list(broken.glob("runs/landmark-*/checkpoints/step-*18.ckpt")))
    finish(broken, "logger=csv")
    assert len(results(whole)) == 2 + 5
    assert results(broken) == results(whole)
    assert not [p for p in broken.rglob("*") if p.name.endswith((".tmp", ".part"))]

    third = finish(broken, "logger=csv")
    assert "0 of 5 rows evaluated now" in third
