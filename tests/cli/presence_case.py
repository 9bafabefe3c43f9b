"""Processes that work together, one of which is stopped, dies, or does not come."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from landmark.cli.exit_codes import reported
from landmark.experiment.team import joined, tell
from landmark.utils.errors import UserError
from landmark.utils.team import started_together

PATIENCE = 4.0  # seconds


def part(folder: Path, case: str) -> None:
    """What each process does; its messages go to the file FOLDER/RANK."""
    this = started_together()
    assert this is not None
    messages = os.open(folder / str(this.rank), os.O_CREAT | os.O_WRONLY)
    os.dup2(messages, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    (folder / f"{this.rank}.pid").write_text(str(os.getpid()))
    if case == f"{this.rank} is absent":
        sys.exit(3)
    try:
        with reported(), joined(lambda told: add(case), PATIENCE / 60) as works:
            if works:
                lead(folder, case)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def lead(folder: Path, case: str) -> None:
    """The part of the first process."""
    if case == "0 refuses":
        raise UserError("train.steps=-1: must be at least 1")
    if case == "0 stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "0 evaluates":
        time.sleep(3 * PATIENCE)
    if case == "all are suspended":
        ids = " ".join(path.read_text() for path in folder.glob("*.pid"))
        subprocess.Popen(["sh", "-c", f"kill -STOP {ids}; sleep {2 * PATIENCE}; kill -CONT {ids}"])
        time.sleep(1)
    tell("add")
    add(case)


def add(case: str) -> None:
    """A step: a sum over all processes."""
    if case == f"{dist.get_rank()} stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == f"{dist.get_rank()} is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size()
