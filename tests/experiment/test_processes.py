"""What starts several processes ends with them, and they with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from landmark.experiment.processes import train_together
from landmark.utils.errors import UserError
from landmark.utils.files import write_json

CASE = "tests.experiment.processes_case"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("mistake", r"in 2 processes failed \(exit code 1\): see the messages above"),
        ("refused", "^train.length=0: no text$"),
        ("killed", r"in 2 processes failed \(ended by SIGKILL\)"),
    ],
)
def test_failure_of_one_is_one_error(tmp_path, capfd, how, said):
    write_json(tmp_path / "how.json", how)
    with pytest.raises(UserError, match=said):
        train_together(CASE, tmp_path, 2)
    printed = capfd.readouterr().err
    assert ("RuntimeError: a mistake" in printed) == (how == "mistake")
    assert "torch" not in printed
    assert not (tmp_path / "failure.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_first_is_the_end_of_all(tmp_path, number):
    write_json(tmp_path / "how.json", "wait")
    command = [sys.executable, "-m", CASE, str(tmp_path), "start"]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    ids = [wait_for(lambda rank=rank: (tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number
        assert printed == "stopped by SIGTERM: the same command goes on from here\n"
    wait_for(lambda: not any(os.path.exists(f"/proc/{each}") for each in ids))


def wait_for(found):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if result := found():
                return result
        except FileNotFoundError:
            pass
        time.sleep(0.05)
    raise TimeoutError
