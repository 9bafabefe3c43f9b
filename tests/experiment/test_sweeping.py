"""Leftovers of killed processes are deleted by the next command; what others are at work on stays."""

import os
import signal
import subprocess
import sys

import pytest

from landmark.utils.files import delete_leftovers, locked

KILLED = """
import os, signal, sys
from landmark.utils import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomic(sys.argv[1], bytes(100_000))
"""


def killed_while_it_wrote(path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_command_that_makes_runs_deletes_what_killed_ones_left(work):
    """Temporary files that nobody has locked, and checkpoints of runs with weights and a record."""
    work("+experiment=quickstart", "data=pg19")
    first, second = (work.output / "runs").iterdir()
    for path in (first / "model.safetensors", work.output / "records" / "rows" / "a.json", work.output / "report.html"):
        killed_while_it_wrote(path)
    for folder in (first, second):
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "step-00000001.ckpt").touch()
    (second / "model.safetensors").unlink()
    left = list(work.output.rglob(".*.tmp"))
    assert len(left) == 3
    work("+experiment=quickstart", "data=pg19", "task=prepare")  # which makes no runs
    assert list(work.output.rglob(".*.tmp")) == left
    with locked(left[0]) as is_ours:
        assert is_ours
        work("+experiment=quickstart", "data=pg19")
        assert list(work.output.rglob(".*.tmp")) == left[:1]
    assert not (first / "checkpoints").exists()
    assert (second / "checkpoints").exists()  # its weights are gone
    work("+experiment=quickstart", "data=pg19")
    assert list(work.output.rglob(".*.tmp")) == []


def test_a_memory_is_saved_after_a_kill(tmp_path):
    """Numbers of processes recur: in a container each command may be number 7."""
    import torch

    from landmark.memory import Memory

    left = tmp_path / f".book.{os.getpid()}.tmp"
    left.mkdir()
    (left / "layer-0.blocks").touch()
    (tmp_path / ".book.999999.tmp").mkdir()
    memory = Memory(block_size=2, k=1)
    memory.attend(0, *(torch.randn(1, 1, 6, 4) for _ in range(3)))
    memory.commit()
    memory.save(tmp_path / "book")
    assert [path.name for path in tmp_path.iterdir()] == ["book"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_locked_is_no_leftover(tmp_path, kind):
    path = tmp_path / "temporary"
    path.mkdir() if kind == "folder" else path.touch()
    with locked(path) as is_ours:
        assert is_ours
        delete_leftovers([path])
        assert path.exists()
    delete_leftovers([path, tmp_path / "gone"])
    assert not path.exists()
