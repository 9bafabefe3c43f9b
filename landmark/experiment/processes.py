"""Trainings by several processes, one for each device, which torchrun or srun starts and watches.

- A command that trains on several devices of its machine starts them itself, by torchrun's agent (`train_together`).
- A command that torchrun or srun starts on every device is one of them (`joined`). The first process works as if it
  were alone: it alone prepares corpora, evaluates, and writes records. Where a run is trained, it tells the others its
  settings, and all train.
"""

import atexit
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.config import Config
from landmark.utils.errors import Diverged, UserError, in_one_line
from landmark.utils.team import Team, first_says, started_together

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PATIENCE = timedelta(minutes=10)  # that an operation waits for the other processes, as PyTorch's on GPUs by default
GRACE = timedelta(minutes=10)  # from a signal to the end of the processes, which write a checkpoint
_LONG = timedelta(days=30)  # that the others wait while the first prepares and evaluates
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_groups: dict[str, Any] = {}  # of processes that have joined: to tell each other, and to ask who is missing


class Lost(UserError):
    """An operation with the other processes failed. It is seldom the first error."""


_KINDS = {kind.__name__: kind for kind in (UserError, Diverged)}


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


def for_team(config: Config, team: Team) -> Config:
    """A training's configuration with the devices of the processes that were started on this machine."""
    return replace(config, trainer=replace(config.trainer, devices=team.local_size))


def train_together(train: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> Any:
    """What `train(*arguments)` returns in the first of `count` processes. Raises the UserError of one that failed, or
    one that names it. A signal ends the others after a checkpoint, and then has its usual effect here.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    while True:
        logging.disable(logging.CRITICAL)  # torchrun's own reports
        try:
            with tempfile.TemporaryDirectory() as folder:
                launch = LaunchConfig(
                    *(1, 1, count),
                    **{"run_id": "landmark", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0},
                    logs_specs=DefaultLogsSpecs(folder),
                    signals_to_handle=",".join(number.name for number in _SIGNALS),
                    shutdown_timeout=round(GRACE.total_seconds()),
                )
                try:
                    return elastic_launch(launch, _one_of_several)(train, arguments)[0]
                except ChildFailedError as error:
                    raise _failure(error, Path(folder)) from None
        except SignalException as stop:
            number = signal.Signals(stop.sigval)
            for process in multiprocessing.active_children():  # a second signal does not wait for them
                process.kill()
        finally:
            logging.disable(logging.NOTSET)
            for each, handler in before.items():
                signal.signal(each, handler)
        if before[number] == signal.SIG_DFL:
            print(f"stopped by {number.name}: the same command goes on from here", file=sys.stderr)
            sys.exit(128 + number)
        if callable(handler := before[number]):
            handler(number, None)  # if it returns there is no reason to stop, as it is with one process


def _one_of_several(train: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.setsid()  # Ctrl-C is for the command alone, which passes it on
    team = started_together()
    assert team is not None
    _join(team)
    try:
        with _lost_in_one_line():
            return train(*arguments)
    finally:
        _leave()


def _failure(error: "ChildFailedError", folder: Path) -> UserError:
    """The error of the process that failed first, which may have ended others. folder: where each has left its own."""
    rank, failure = error.get_first_failure()
    for path in sorted(folder.rglob("error.json")):
        message = json.loads(path.read_text())["message"]
        kind, _, said = message["message"].partition(": ")
        if kind in _KINDS:
            return _KINDS[kind](said)
        if kind != Lost.__name__:
            print(message["extraInfo"]["py_callstack"], file=sys.stderr)
            return UserError(f"one of the processes failed ({message['message']}): see the messages above")
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return UserError(f"process {rank} of the training {how}; the same command goes on from the last checkpoint")


@contextmanager
def joined(follow: Callable[[Any], object]) -> Iterator[bool]:
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
    atexit.register(_leave)  # not in `joined`: a later job of this command line uses the same connections


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
    """Raise Lost for an error of Gloo's or of the store's: another process has ended, or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not ("gloo" in str(error) or type(error).__name__.startswith("Dist")):
            raise
        said = " ".join((_missing() or str(error)).split())
        raise Lost(
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
