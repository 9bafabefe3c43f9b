"""Sweeps of `-m`, and the launchers that carry out their jobs beside each other.

All jobs are checked before the first begins, and one that fails does not end the others. Each job is named by its
values of what is swept.

`hydra/launcher` (joblib, submitit_slurm or submitit_local) and its settings are read from the command line alone. They
are numbers and short texts: what would be a line of a script, a folder or code is no setting.
"""

import ctypes
import itertools
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.cli import tables
from landmark.cli.command import Command
from landmark.cli.composing import config_loader, settings_found
from landmark.cli.terminal import open_streams, report, said, show_log
from landmark.experiment.config import Config, to_config
from landmark.experiment.config.command_line import PROGRAM, StartedJob, begin, is_of_hydra
from landmark.experiment.config.rows import MOST, Composer, cell_name, combinations, compose_job, named, one_line, parse
from landmark.utils.errors import UserError, counted, in_one_line
from landmark.utils.team import started_together
from landmark.utils.trust import check_plain

_GROUP = "hydra/launcher"
_DEATH_OF_PARENT = 1  # Linux's PR_SET_PDEATHSIG
_SHOWN = 5  # jobs that are named before the first begins
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
        return Outcome(message or f"{type(error).__name__}: {in_one_line(error)}", code)
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
            raise UserError(f"{_GROUP}: {in_one_line(error)}") from error
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

        check_plain("output", str(logs.absolute()))  # a folder that was downloaded may have any name
        shared = {item.name for item in fields(SubmititLocal)}
        settings = {key if key in shared else f"slurm_{key}": value for key, value in asdict(self).items()}
        again = {key: settings.pop(key) for key in ("slurm_max_num_timeout",) if key in settings}
        try:
            executor = submitit.AutoExecutor(logs / ".submitit" / "%j", self.cluster, **again)
            executor.update_parameters(**settings)
            submitted = executor.map_array(_Elsewhere(carry_out), jobs)
            print(f"{len(jobs)} jobs are submitted, they print into {logs}/.submitit")
        except (RuntimeError, FailedJobError) as error:  # of a machine without Slurm, or of sbatch
            raise UserError(f"{_GROUP}: {in_one_line(error)}") from error
        outcomes = []
        for job in submitted:
            try:
                outcomes.append(job.results()[0])
            except (FailedJobError, UncompletedJobError) as error:
                outcomes.append(Outcome(in_one_line(error), code=2))
        return outcomes


@dataclass
class SubmititSlurm(SubmititLocal):
    """An array, one task a job (docs/cluster.md). A job that is preempted or runs out of time is queued again."""

    cluster: ClassVar[str] = "slurm"
    cpus_per_task: int | None = 8
    gpus_per_node: int | None = 1
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
    """The launcher of a command line, and the command without its settings. Raises UserError for others of Hydra's."""
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
            _check_setting(each.key_or_group, key, settings[key])
        except OmegaConfBaseException as error:
            raise UserError(f"{each.input_line}: {str(error).splitlines()[0]}") from None
    job = StartedJob(
        words=[each.input_line or "" for each in parsed if not is_of_hydra(each.key_or_group)],
        launcher=None if name == "basic" else name,
        launcher_words=[each.input_line or "" for each in own],
    )
    return OmegaConf.to_object(settings), job  # pyright: ignore[reportReturnType]


def _check_setting(whole: str, key: str, value: Any) -> None:
    if isinstance(value, str):
        check_plain(whole, value)
    least = 0 if key in _FROM_ZERO else 1
    if isinstance(value, int) and not isinstance(value, bool) and value < least and (key, value) != ("n_jobs", -1):
        raise UserError(f"{whole}={value}: must be at least {least}")


def sweep(
    command: StartedJob, launcher: Basic, carry_out: CarryOut, run: Callable[[Config, list[str]], object]
) -> None:
    """Carry out the jobs of a command line, show the table of their records, and list those that failed. run: carries
    out a task. Raises UserError where a job cannot start. Exits with the code of a command where one failed.
    """
    overrides = OverridesParser.create(config_loader=config_loader()).parse_overrides(command.words)
    swept = {each.get_key_element(): each for each in overrides if each.is_sweep_override()}
    _check_swept(swept.values())
    composer = Composer(compose_job)
    words = _checked_jobs(overrides, swept, composer)
    values = [{_key(word): word.partition("=")[2] for word in job if _key(word) in swept} for job in words]
    shown = [_varied(job, swept) for job in words]
    jobs = [
        replace(command, words=job, name=cell_name(each) or PROGRAM, number=number)
        for number, (job, each) in enumerate(zip(words, values))
    ]
    outcomes = launcher.launch(jobs, carry_out, Path(to_config(composer(words[0])).output) / "sweeps")
    begin(command)
    try:
        kept = [each.input_line or "" for each in overrides if not each.is_sweep_override()]
        fixed = to_config(compose_job(kept))
        team = started_together()
        has_tables = any(each.key_or_group == "experiment" for each in swept.values())  # each job shows its own
        if fixed.task == "auto" and not has_tables and (team is None or team.rank == 0):
            if not named(fixed):
                tables.show_sweep(fixed, kept, command.words, values)
            elif {*swept} <= {"row"}:
                run(replace(fixed, task="table"), command.words)
    finally:
        _end({line: outcome for line, outcome in zip(shown, outcomes) if outcome.error is not None})


def _check_swept(swept: Collection[Override]) -> None:
    for each in swept:
        if not each.is_discrete_sweep():
            raise UserError(f"{each.input_line}: has no list of values")
        if not any(True for _ in each.sweep_string_iterator()):
            reason = f"matches nothing in conf/{each.key_or_group}"
            raise UserError(f"{each.input_line}: {reason if isinstance(each.value(), Glob) else 'has no value'}")


def _varied(job: Sequence[str], swept: Collection[str]) -> str:
    """What a job has and others have not; all of it where that is nothing."""
    return " ".join(word for word in job if _key(word) in swept) or " ".join(job)


def _checked_jobs(overrides: Sequence[Override], swept: Collection[str], composer: Composer) -> list[list[str]]:
    """The overrides of every job. Raises UserError, naming the jobs, where one of them cannot start."""
    choices = [
        [f"{each.get_key_element()}={value}" for value in itertools.islice(each.sweep_string_iterator(), MOST + 1)]
        if each.is_sweep_override()
        else [each.input_line or ""]
        for each in overrides
    ]
    asked, faults = [list(words) for words in combinations(choices, "-m")], {}
    for job in asked:
        try:
            Command.of(to_config(composer(job)), job)
        except (HydraException, OmegaConfBaseException, UserError) as error:
            faults[_varied(job, swept)] = one_line(error)
    if faults:
        said = "; ".join(f"{words}: {message}" for words, message in list(faults.items())[:_SHOWN])
        more = "; …" if len(faults) > _SHOWN else ""
        raise UserError(f"{len(faults)} of {len(asked)} jobs cannot start, so none was: {said}{more}")
    return asked


def _end(failed: dict[str, Outcome]) -> None:
    """List the jobs that failed, and exit with the code of a command; nothing where none failed."""
    if failed:
        print(f"{counted(len(failed), 'job')} failed:", file=sys.stderr)
        for words, outcome in failed.items():
            print(f"  {words}\nerror: {outcome.error}", file=sys.stderr)
        sys.exit(min(outcome.code for outcome in failed.values()))


def _key(word: str) -> str:
    """The key of an override, with its + where it has one."""
    return word.partition("=")[0]
