"""What this program adds to Hydra's jobs, by a callback: commands are checked before anything is made, and the jobs of
a sweep end in a table of their rows.
"""

import copy
import ctypes
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.question import Question
from landmark.cli.terminal import report, reported, said
from landmark.experiment.config import Config, to_config
from landmark.experiment.config.checks import unused
from landmark.experiment.config.command_line import StartedJob, as_typed
from landmark.experiment.config.rows import (
    MOST,
    Compose,
    Composer,
    cell_names,
    combinations,
    compose_job,
    named,
    one_line,
)
from landmark.utils.errors import UserError, counted, in_one_line
from landmark.utils.files import read_json, write_json
from landmark.utils.team import started_together

if TYPE_CHECKING:
    from landmark.cli.command import Command

OUTCOMES = "outcomes"  # in the folder of a sweep: how each job ended
# Tasks that have a folder of Hydra's, with their settings and log.
_MAKE = ("auto", "evaluate", "prepare", "teach", "train")
_ANSWER = ("chat", "generate")  # tasks to which standard output belongs
_DEATH_OF_PARENT = 1  # Linux's PR_SET_PDEATHSIG
_SHOWN = 5  # jobs that are named before the first begins
_EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"


@dataclass
class Outcome:
    """Of a sweep's job. records: of its rows. error: in one line, None where it ended well. code: with which a command
    that fails so would exit.
    """

    words: list[str]
    values: dict[str, str]
    records: list[str] = field(default_factory=list)
    error: str | None = None
    code: int = 0


@dataclass
class _Sweep:
    """words: of the command line. swept: keys of it that have several values."""

    words: list[str]
    swept: list[str]
    folder: Path


_sweep: _Sweep | None = None
_checked: "tuple[list[str], Question | Command] | None" = None


class Jobs(Callback):
    """Hydra's callback, from conf/config.yaml."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse what makes no sense, before Hydra makes a folder. Tasks that only ask have none."""
        global _checked
        with reported():
            words, task = as_typed(config.hydra.overrides.task), OmegaConf.select(config, "task")
            _place(config, task)
            team = started_together()
            with _known(config):
                if team is None or team.rank == 0:
                    _checked = words, asked_by(to_config(_job_of(config)), words)

    def on_run_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, config: DictConfig, job_return: JobReturn, **_: Any
    ) -> None:
        """One line for an error, and its exit code, in place of Hydra's traceback."""
        if job_return.status is JobStatus.FAILED:
            with reported(), redirect_stderr(StringIO()):
                _ = job_return.return_value  # raises it

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check all jobs before the first begins, and tell them which keys are swept."""
        global _sweep
        with reported(), _known(config):
            words = as_typed(config.hydra.overrides.task)
            params = OmegaConf.select(config, "hydra.sweeper.params") or {}
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            parsed = parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *words])
            overrides = list({each.get_key_element(): each for each in parsed}.values())
            if config.hydra.runtime.choices.get("hydra/sweeper") == "basic":
                _check_jobs(overrides)
            fixed = [each.key_or_group for each in overrides if not each.is_sweep_override()]
            folder = Path(config.hydra.sweep.dir)
            for old in (folder / OUTCOMES).glob("*.json"):
                old.unlink()
            excluded = [*fixed, *OmegaConf.select(config, _EXCLUDED)]
            config.hydra.overrides.hydra.append(f"{_EXCLUDED}=[{','.join(excluded)}]")
            _sweep = _Sweep(words, [each.key_or_group for each in overrides if each.is_sweep_override()], folder)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Show the table of the rows."""
        with reported():
            end()


def asked_by(config: Config, words: list[str], compose: Compose = compose_job) -> "Question | Command":
    """What a command line asks for, checked: an answer, or rows. Raises UserError where a setting makes no sense."""
    if Question.is_asked_by(config):
        return Question.of(config, words)
    from landmark.cli.command import Command

    return Command.of(config, words, compose)


def asked_before(words: list[str]) -> "Question | Command | None":
    """What these words ask for, where it was checked just before."""
    global _checked
    found, _checked = _checked, None
    return found[1] if found is not None and found[0] == words else None


def _job_of(config: DictConfig) -> DictConfig:
    """What Hydra gives a job: the configuration without its own."""
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    return job


@contextmanager
def _known(config: DictConfig) -> Iterator[None]:
    """Have `${hydra:…}` and `started` know a job that has not begun yet."""
    ready = copy.deepcopy(config)
    with open_dict(ready):
        place = ready.hydra.run
        if ready.hydra.mode is RunMode.MULTIRUN:
            ready.hydra.job.num, ready.hydra.job.id, place = 0, "0", ready.hydra.sweep
        ready.hydra.runtime.output_dir = str(place.dir)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(ready)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _place(config: DictConfig, task: str) -> None:
    """No folder for a task that makes nothing, nor for a process that only trains. An answer's log is on stderr."""
    team, own = started_together(), " ".join(as_typed(config.hydra.overrides.hydra))
    handlers = OmegaConf.select(config, "hydra.job_logging.handlers") or {}
    if (task not in _MAKE or (team is not None and team.rank > 0)) and "hydra.run.dir" not in own:
        config.hydra.run.dir, config.hydra.output_subdir = ".", None
        if "file" in handlers:
            with open_dict(config):
                del handlers["file"]
                config.hydra.job_logging.root.handlers.remove("file")
    if task in _ANSWER and "console" in handlers:
        handlers["console"].stream = "ext://sys.stderr"


def _check_jobs(overrides: Sequence[Override]) -> None:
    """Raise UserError, naming the jobs, where one of them cannot start, or a key has an effect in none."""
    choices = [
        [f"{each.get_key_element()}={value}" for value in itertools.islice(each.sweep_string_iterator(), MOST + 1)]
        if each.is_sweep_override()
        else [each.input_line or ""]
        for each in overrides
    ]
    swept = [each.get_key_element() for each in overrides if each.is_sweep_override()]
    composer, faults, configs = Composer(compose_job), {}, []
    jobs = [list(words) for words in combinations(choices, "-m")]
    if empty := [each.input_line for each, values in zip(overrides, choices) if not values]:
        raise UserError(f"{empty[0]}: has no value")
    for job in jobs:
        try:
            checked = asked_by(to_config(composer(job)), job)
            configs += [] if checked.is_experiment else [checked.first_config]
        except (HydraException, OmegaConfBaseException, UserError) as error:
            faults[_varied(job, swept)] = one_line(error)
    if faults:
        told = "; ".join(f"{words}: {message}" for words, message in list(faults.items())[:_SHOWN])
        more = "; …" if len(faults) > _SHOWN else ""
        raise UserError(f"{len(faults)} of {len(jobs)} jobs cannot start, so none was: {told}{more}")
    # A key without an effect on one job is reported by it.
    if len(configs) == len(jobs) and (fault := unused([each.key_or_group for each in overrides], configs)):
        raise fault


def _varied(job: Sequence[str], swept: Sequence[str]) -> str:
    """What a job has and others have not; all of it where that is nothing."""
    return " ".join(word for word in job if word.partition("=")[0] in swept) or " ".join(job)


# ---- in a job


@contextmanager
def noted(job: StartedJob) -> Iterator[Outcome]:
    """Note how a sweep's job ends, below the folder of the sweep. Its error is told at once."""
    outcome = Outcome(job.words, job.values)
    if job.number is None or ((team := started_together()) is not None and team.rank > 0):
        yield outcome
        return
    if job.launcher == "joblib" and sys.platform == "linux":
        # Linux ends it with the command, even after SIGKILL; else it would go on with its job, alone.
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
    try:
        yield outcome
    except BrokenPipeError as error:
        raise SystemExit(report(error)) from None
    except Exception as error:
        outcome.code = report(error)
        outcome.error = said(error) or f"{type(error).__name__}: {in_one_line(error)}"
        raise
    finally:
        hydra = HydraConfig.get()
        write_json(Path(hydra.runtime.cwd, hydra.sweep.dir, OUTCOMES, f"{job.number}.json"), asdict(outcome))


# ---- after the last job


def end() -> None:
    """Show the table of a sweep's rows, and list the jobs that failed. Exits with the code of one that did."""
    global _sweep
    if (sweep := _sweep) is None:
        return
    _sweep = None
    files = sorted((sweep.folder / OUTCOMES).glob("*.json"), key=lambda file: int(file.stem))
    outcomes = [Outcome(**read_json(file)) for file in files]
    failed = [each for each in outcomes if each.error is not None]
    team = started_together()
    try:
        # each experiment of several shows its own table
        if outcomes and "experiment" not in sweep.swept and (team is None or team.rank == 0):
            _show(sweep, outcomes)
    finally:
        if failed:
            print(f"{counted(len(failed), 'job')} failed:", file=sys.stderr)
            for each in failed:
                words = " ".join(f"{key}={value}" for key, value in each.values.items()) or " ".join(each.words)
                print(f"  {words}\nerror: {each.error}", file=sys.stderr)
            sys.exit(min(each.code for each in failed))


def _show(sweep: _Sweep, outcomes: Sequence[Outcome]) -> None:
    from landmark.cli import tables
    from landmark.cli.command import Command

    config = to_config(compose_job(outcomes[0].words))
    if config.task != "auto":
        return
    if not named(config):
        names = cell_names([each.values for each in outcomes])
        rows = dict(zip(names, (each.records for each in outcomes)))
        tables.show_sweep(replace(config, start=None), sweep.words, rows)
    elif {*sweep.swept} <= {"row"}:
        kept = [word for word in outcomes[0].words if not word.startswith("row=")]
        tables.show_records(Command.of(replace(to_config(compose_job(kept)), task="table"), sweep.words))
