"""Jobs of a sweep beside each other: `python run.py -m … hydra/launcher=joblib`, `submitit_slurm` or `submitit_local`.

`hydra/launcher` and its settings are read from the command line alone. They are numbers and short texts: what would be
a line of a script, a folder or code is no setting.
"""

import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.composing import settings_found
from landmark.cli.terminal import open_streams, report, said, show_log
from landmark.config.command_line import StartedJob, begin, is_of_hydra
from landmark.config.composer import parse
from landmark.utils.errors import UserError
from landmark.utils.trust import check_plain

_GROUP = "hydra/launcher"
_DEATH_OF_PARENT = 1  # Linux's PR_SET_PDEATHSIG
_FROM_ZERO = ("gpus_per_node", "max_num_timeout", "signal_delay_s")


@dataclass
class Outcome:
    """Of a job. error: in one line, None where it ended well. code: with which a command that fails so would exit."""

    error: str | None = None
    code: int = 0


CarryOut = Callable[[StartedJob], object]


def attempt(job: StartedJob, carry_out: CarryOut) -> Outcome:
    """Carry out a job that others follow even if it fails. Its error is told at once, and kept."""
    print(f"#{job.number} {job.name}")
    try:
        carry_out(job)
    except BrokenPipeError as error:
        raise SystemExit(report(error)) from None
    except Exception as error:
        code, message = report(error), said(error)
        return Outcome(message or f"{type(error).__name__}: {' '.join(str(error).split())}", code)
    return Outcome()


@dataclass
class Basic:
    """One job after the other, in this process."""

    def launch(self, jobs: Sequence[StartedJob], carry_out: CarryOut, logs: Path) -> list[Outcome]:
        """Carry out jobs. logs: a folder for what they print, where they are other processes."""
        return [attempt(job, carry_out) for job in jobs]


@dataclass
class Joblib(Basic):
    """Processes of this machine, so many at a time; -1: as many as there are cores."""

    n_jobs: int = 2

    def launch(self, jobs: Sequence[StartedJob], carry_out: CarryOut, logs: Path) -> list[Outcome]:
        import joblib

        try:
            done: Any = joblib.Parallel(self.n_jobs)(joblib.delayed(_Elsewhere(carry_out))(job) for job in jobs)
        except RuntimeError as error:  # of a process that was killed, with which the others end
            raise UserError(f"{_GROUP}: {' '.join(str(error).split())}") from error
        return list(done)


@dataclass
class SubmititLocal(Basic):
    """A cluster tried out: processes of this machine, all at once."""

    cluster: ClassVar[str] = "local"
    name: str = "landmark"
    timeout_min: int = 24 * 60
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem_gb: int | None = None
    stderr_to_stdout: bool = True

    def launch(self, jobs: Sequence[StartedJob], carry_out: CarryOut, logs: Path) -> list[Outcome]:
        import submitit
        from submitit.core.utils import FailedJobError, UncompletedJobError

        check_plain("output", str(logs))
        shared = {item.name for item in fields(SubmititLocal)}
        settings = {key if key in shared else f"slurm_{key}": value for key, value in asdict(self).items()}
        again = {key: settings.pop(key) for key in ("slurm_max_num_timeout",) if key in settings}
        try:
            executor = submitit.AutoExecutor(logs / ".submitit" / "%j", self.cluster, **again)
            executor.update_parameters(**settings)
            submitted = executor.map_array(_Elsewhere(carry_out), jobs)
            print(f"{len(jobs)} jobs are submitted, they print into {logs}/.submitit")
        except (RuntimeError, FailedJobError) as error:  # of a machine without Slurm, or of sbatch
            raise UserError(f"{_GROUP}: {' '.join(str(error).split())}") from error
        outcomes = []
        for job in submitted:
            try:
                outcomes.append(job.results()[0])
            except (FailedJobError, UncompletedJobError) as error:
                outcomes.append(Outcome(" ".join(str(error).split()), code=2))
        return outcomes


@dataclass
class SubmititSlurm(SubmititLocal):
    """An array, one task a job.

    A job that is preempted or runs out of time is queued again, and goes on from its last checkpoint. One that trains
    on several GPUs (trainer=ddp) takes them on one node: gpus_per_node; on several nodes it is started once for each
    GPU: nodes and tasks_per_node (docs/cluster.md).
    """

    cluster: ClassVar[str] = "slurm"
    cpus_per_task: int | None = 8
    gpus_per_node: int | None = 1
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    max_num_timeout: int = 20  # times that a job which ran out of time is queued again
    signal_delay_s: int = 120  # from the signal to the end of the job
    array_parallelism: int = 32


class _Elsewhere:
    """A job in a process that a launcher started. submitit calls `checkpoint` to queue it again."""

    def __init__(self, carry_out: CarryOut) -> None:
        self.carry_out = carry_out

    def __call__(self, job: StartedJob) -> Outcome:
        if job.launcher == "joblib" and sys.platform == "linux":
            # Linux ends it with the command, even after SIGKILL; else it would go on with its job, alone.
            ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
        open_streams()
        show_log()
        begin(job)
        with settings_found():
            return attempt(job, self.carry_out)

    def checkpoint(self, job: StartedJob) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, job)


LAUNCHERS = {"basic": Basic, "joblib": Joblib, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm}


def chosen(words: Sequence[str]) -> tuple[Basic, StartedJob]:
    """The launcher of a command line, and the command without the settings of the launcher.

    Raises UserError for settings of Hydra's that there are not here, or of another type, and for a missing package.
    """
    parsed = parse(words)
    own = [each for each in parsed if is_of_hydra(each.key_or_group)]
    name = next((str(each.value()) for each in own if each.key_or_group == _GROUP), "basic")
    if name not in LAUNCHERS:
        raise UserError(f"{_GROUP}={name}: must be one of {', '.join(LAUNCHERS)}")
    settings = OmegaConf.structured(LAUNCHERS[name])
    for each in own:
        group, _, key = each.key_or_group.rpartition(".")
        if each.key_or_group == _GROUP:
            continue
        if group != _GROUP.replace("/", "."):
            raise UserError(f"{each.input_line}: of Hydra's own settings only {_GROUP} and hydra.launcher.… are read")
        try:
            settings[key] = each.value()
            _check(each.key_or_group, key, settings[key])
        except OmegaConfBaseException as error:
            raise UserError(f"{each.input_line}: {str(error).splitlines()[0]}") from None
    job = StartedJob(
        words=[each.input_line or "" for each in parsed if not is_of_hydra(each.key_or_group)],
        launcher=None if name == "basic" else name,
        launcher_words=[each.input_line or "" for each in own],
    )
    return OmegaConf.to_object(settings), job  # pyright: ignore[reportReturnType]


def _check(whole: str, key: str, value: Any) -> None:
    if isinstance(value, str):
        check_plain(whole, value)
    least = 0 if key in _FROM_ZERO else 1
    if isinstance(value, int) and not isinstance(value, bool) and value < least and (key, value) != ("n_jobs", -1):
        raise UserError(f"{whole}={value}: must be at least {least}")
