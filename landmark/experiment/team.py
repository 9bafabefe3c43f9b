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
from landmark.config.ranges import MOST_PATIENCE
from landmark.utils.errors import UserError
from landmark.utils.presence import Presence, is_reached, shown, within
from landmark.utils.team import Team, first_says, leave, lost_in_one_line, started_together

_LONG = timedelta(days=30)  # that the others wait while the first prepares and evaluates, if it gives signs of life
_telling: Any = None  # the processes, as a group in which operations may take that long


@contextmanager
def joined(follow: Callable[[Any], object], minutes: float) -> Iterator[bool]:
    """Whether this process has to work. Before it is told so, one that is not the first trains as the first tells it.

    Args:
        follow: called with what `tell` was called with in the first process.
        minutes: that a process waits for one that does not come, or gives no sign of life.

    Raises UserError where srun's settings do not say which processes belong together, where one of them does not come,
    and where the connection with one is lost.
    """
    team = started_together()
    if team is None:
        yield True
        return
    join(team, minutes)
    with lost_in_one_line():
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
        return first_says(lambda: None, _telling)
    except RuntimeError:  # of Gloo, whose connection is closed
        sys.exit(2)


def tell(what: Any) -> None:
    """In the first process: tell the others what to train; None: nothing more."""
    first_says(lambda: what, _telling)


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


def join(team: Team, minutes: float) -> None:
    """Connect this process with the others, in the place that Lightning's environments name.

    minutes: that it waits for them to come, and for a sign of life later; an operation with all may take twice as long.
    Raises UserError as `joined` does.
    """
    global _telling
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
    patience = 60 * (minutes if 0 < minutes <= MOST_PATIENCE else 1)  # the first process refuses any other
    place = f"{environment.main_address}:{environment.main_port}"
    with (
        lost_in_one_line(),
        within(2.5 * patience, f"one of {team.size} processes, all of which must come to {place},"),
    ):
        store = _store(team, environment.main_address, environment.main_port, patience)
        presence = Presence(store, team, patience)
        presence.join()
        presence.watch()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        group = {"rank": team.rank, "world_size": team.size, "timeout": timedelta(seconds=2 * patience)}
        dist.init_process_group(backend, store=store, **group)
        _telling = dist.new_group(backend="gloo", timeout=_LONG)
    atexit.register(_leave, presence)  # not in `joined`: a later job of this command line uses the same connections


def _leave(presence: Presence) -> None:
    global _telling
    presence.leave()
    _telling = None
    leave()


def _store(team: Team, address: str, port: int, patience: float) -> Any:
    """The store that torchrun keeps, or the first process. Raises UserError where it cannot be reached, or kept."""
    import torch.distributed

    dist: Any = torch.distributed
    place = f"{address}:{port}"
    is_first = team.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    settings = {"timeout": timedelta(seconds=patience), "wait_for_workers": False, "multi_tenant": True}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not is_first and not is_reached(address, port, patience):
        raise UserError(f"rank 0 was not reached within {shown(patience)} at {place}: see its messages")
    try:
        return dist.PrefixStore(f"landmark/{attempt}", dist.TCPStore(address, port, is_master=is_first, **settings))
    except RuntimeError as error:
        if not is_first:
            raise
        raise UserError(f"rank 0 cannot listen at {place} ({' '.join(str(error).split())[:160]})") from error
