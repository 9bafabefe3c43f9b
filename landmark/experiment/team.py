"""One command in several processes, which torchrun or srun started: the first works, the others train with it.

1. Every process reads the command line and joins the others.
2. The first carries out the command as if it were alone: it alone prepares corpora, evaluates, and writes records.
3. Where a run is trained, it tells the others its settings, and all train. They are told once more at the end.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from landmark.config import Config
from landmark.utils.errors import UserError
from landmark.utils.team import Team, first_says, leave, started_together

_PATIENCE = timedelta(days=30)  # of the others, while the first evaluates


@contextmanager
def joined(follow: Callable[[Any], object]) -> Iterator[bool]:
    """Whether this process has to work. Before it is told so, one that is not the first trains as the first tells it.

    follow: called with what `tell` was called with in the first process. Raises UserError where srun's settings do not
    say which processes belong together.
    """
    team = started_together()
    if team is None:
        yield True
        return
    _join(team)
    if team.rank > 0:
        while (told := _hear()) is not None:
            follow(told)
        yield False
        return
    yield True
    tell(None)  # not after an error: the others, which may be in a training, are ended by what started them


def _hear() -> Any:
    """What the first process tells this one. Exits with code 2 where the first ended: it has said why."""
    try:
        return first_says(lambda: None)
    except RuntimeError:  # of Gloo and NCCL, whose connection is closed
        sys.exit(2)


def tell(what: Any) -> None:
    """In the first process: tell the others what to train; None: nothing more."""
    first_says(lambda: what)


def for_team(config: Config, team: Team) -> Config:
    """A training's configuration with the devices and machines of the processes that were started.

    Raises UserError where it asks for another number of machines.
    """
    asked = config.trainer.num_nodes
    if asked not in (None, team.machines):
        raise UserError(
            f"trainer.num_nodes={asked}: {team.size} processes were started on {team.machines} machines; start them on "
            f"{asked}, or leave trainer.num_nodes out"
        )
    return replace(config, trainer=replace(config.trainer, devices=team.local_size, num_nodes=team.machines))


def _join(team: Team) -> None:
    """Connect this process with the others, in the place that Lightning's environments name."""
    import torch
    import torch.distributed as dist
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    if dist.is_initialized():  # by an earlier job of this command line
        return
    try:
        environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else SLURMEnvironment()
    except RuntimeError as error:
        raise UserError(f"srun: {' '.join(str(error).split())}") from error
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    os.environ["RANK"] = str(team.rank)  # srun does not set it
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=team.rank, world_size=team.size, timeout=_PATIENCE)
    atexit.register(leave)  # not at the end of `joined`: a later job of this command line uses the same connections
