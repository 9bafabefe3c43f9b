"""Processes that train nothing, as they wait, fail, are stopped, or do not come; and one that kills itself.

python tests/experiment/runs/processes_case.py MARK ARGUMENTS…: the command line, alone or in one of several processes.
The last kills itself once, after step 5, and leaves the file MARK. Each that ends writes its threads to
MARK.RANK.threads.
"""

import atexit
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from landmark.cli.main import main
from landmark.cli.terminal import reported
from landmark.experiment.runs import processes
from landmark.experiment.runs.processes import as_team, tell
from landmark.experiment.training.progress_callback import ProgressCallback
from landmark.utils.errors import UserError
from landmark.utils.team import started_together

PATIENCE = timedelta(seconds=4)


def part(folder: Path, case: str) -> None:
    """What each of several processes that were started together does; its messages go to the file FOLDER/RANK."""
    processes.PATIENCE = PATIENCE
    this = started_together()
    messages = os.open(folder / str(this.rank), os.O_CREAT | os.O_WRONLY)
    os.dup2(messages, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if case == f"{this.rank} is absent":
        sys.exit(3)
    try:
        with reported(), as_team(lambda told: add(case)) as works:
            if works:
                lead(case)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def lead(case: str) -> None:
    if case == "0 refuses":
        raise UserError("train.steps=-1: must be at least 1")
    if case == "0 evaluates":
        time.sleep(2 * PATIENCE.total_seconds())
    tell("add")
    add(case)


def add(case: str) -> None:
    if case == f"{dist.get_rank()} stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == f"{dist.get_rank()} is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size()


def kill_once(mark: Path) -> None:
    team = started_together()
    is_last = team is None or team.rank == team.size - 1
    shown = ProgressCallback.on_train_batch_end

    def show_and_die(self, trainer, *arguments):
        shown(self, trainer, *arguments)
        if trainer.global_step == 5 and is_last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    ProgressCallback.on_train_batch_end = show_and_die


def write_threads(file: Path) -> None:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    file.write_text("\n".join(names))


if __name__ == "__main__":
    mark = Path(sys.argv.pop(1))
    kill_once(mark)
    atexit.register(
        write_threads, mark.with_name(f"{mark.name}.{os.environ.get('RANK')}.threads")
    )  # after those of main
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
