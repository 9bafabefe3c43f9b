"""Trainings by several processes, one for each device, which torchrun or srun starts and watches.

The first process works as if it were alone: it alone prepares corpora, evaluates, and writes records. Where a run is
trained, it tells the others its settings, and all train.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from landmark.experiment.config import Config
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.team import Team, first_says, started_together

PATIENCE = timedelta(minutes=10)  # that an operation waits for the other processes, as PyTorch's on GPUs by default
_LONG = timedelta(days=30)  # that the others wait while the first prepares and evaluates
_groups: dict[str, Any] = {}  # of processes that have joined: to tell each other, and to ask who is missing


def device_count(config: Config) -> int:
    """Processes that a training takes: one per device; those that torchrun or srun started, where one of them did."""
    if (team := started_together()) is not None:
        return team.size
    devices = config.trainer.devices
    if isinstance(devices, int):
        return devices
    if devices != "auto":
        return int(devices) if devices.isdigit() else len([part for part in devices.split(",") if part])
    if config.trainer.accelerator == "cpu" or config.trainer.strategy == "auto":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


@contextmanager
def as_team(follow: Callable[[Any], object]) -> Iterator[bool]:
    """Whether this process has to work. Before, one that is not the first calls `follow` with each thing that the first
    tells. Raises UserError where a process does not come, and where the connection with one is lost.
    """
    team = started_together()
    if team is None:
        yield True
        return
    _join(team)
    with _lost_in_one_line():
        if team.rank > 0:
            while (told := _hear()) is not None:
                follow(told)
            yield False
            return
        yield True
        tell(None)  # not after an error: the others, which may be in a training, are ended by what started them


def tell(what: Any) -> None:
    """In the first process: tell the others what to train; None: nothing more."""
    first_says(lambda: what, _groups["tell"])


def _hear() -> Any:
    """What the first process tells this one. Exits with code 2 where the first ended: it has said why."""
    try:
        return first_says(lambda: None, _groups["tell"])
    except RuntimeError:  # of Gloo, whose connection is closed
        sys.exit(2)


def _join(team: Team) -> None:
    """Connect this process with the others, in the place that Lightning's environments name."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # by an earlier job of this command line
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        try:
            environment = SLURMEnvironment()
        except RuntimeError as error:
            raise UserError(f"srun: {in_one_line(error)}") from error
        os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
        os.environ["RANK"] = str(team.rank)  # srun does not set it
    with _lost_in_one_line():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=team.rank, world_size=team.size, timeout=PATIENCE)
        for use, patience in (("tell", _LONG), ("ask", PATIENCE)):
            _groups[use] = dist.new_group(backend="gloo", timeout=patience)
    atexit.register(_leave)  # not in `as_team`: a later job of this command line uses the same connections


def _leave() -> None:
    """Close the connections while Python still runs: a thread of Gloo's that ends later aborts the process.

    https://github.com/pytorch/pytorch/issues/190489
    """
    import torch.distributed as dist

    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _lost_in_one_line() -> Iterator[None]:
    """Raise UserError for an error of Gloo's or of the store's: another process has ended, or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not ("gloo" in str(error) or type(error).__name__.startswith("Dist")):
            raise
        said = " ".join((_missing() or str(error)).split())
        raise UserError(
            f"the connection with another process was lost ({said[-120:]}): see its messages; the same command goes on "
            "from the last checkpoint"
        ) from error


def _missing() -> str | None:
    """Which processes do not answer, where this is the first one and others do."""
    import torch.distributed as dist

    if "ask" in _groups:
        try:
            dist.monitored_barrier(_groups["ask"], timeout=PATIENCE / 10, wait_all_ranks=True)
        except RuntimeError as error:
            return str(error) if "failed to pass" in str(error) else None
    return None
