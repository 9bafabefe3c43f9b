"""Sweeps of `-m`: all jobs are checked before the first begins, and one that fails does not end the others.

A value that has no effect on a job, as `retrieval.k` on `model=transformer`, is left out of it; of jobs that are then
the same, one is done. Each job is named by its values of what is swept (`hydra.job.name`), kept for the table.
"""

import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.command import Command
from landmark.cli.exit_codes import said
from landmark.config import to_config
from landmark.config.command_line import PROGRAM
from landmark.config.messages import one_line
from landmark.config.rows import cell_name
from landmark.config.schema import GROUPS
from landmark.utils.errors import NoEffect, UserError

_NAMED = "hydra.job.name="
_SHOWN = 5  # jobs that are named before the first begins

_failed: list[tuple[str, Exception]] = []
_jobs: list[dict[str, str]] = []


def jobs() -> list[dict[str, str]]:
    """What each job of the last sweep was given of the keys that are swept."""
    return list(_jobs)


def register() -> None:
    """Have Hydra take `WholeSweeper` for its own basic sweeper, by whose name a configuration knows it."""
    name = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
    Plugins.instance().class_name_to_class[name] = WholeSweeper


def end() -> None:
    """List the jobs that failed, and exit with the code of a command; nothing where none failed."""
    if not _failed:
        return
    print(f"{len(_failed)} job{'s' * (len(_failed) > 1)} failed:", file=sys.stderr)
    code = 2
    for words, error in _failed:
        if (message := said(error)) is None:
            message, code = f"{type(error).__name__}: {' '.join(str(error).split())}", 1
        print(f"  {words}\nerror: {message}", file=sys.stderr)
    _failed.clear()
    sys.exit(code)


class WholeSweeper(BasicSweeper):
    """Hydra's basic sweeper, for all launchers."""

    def setup(self, **given: Any) -> None:
        super().setup(**given)
        _jobs.clear()
        assert self.launcher is not None
        self.launcher = _GoingOn(self.launcher, self)

    def split_arguments(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The overrides of every job. Raises UserError, naming the jobs, where one of them cannot start."""
        swept = [each.get_key_element() for each in overrides if each.is_sweep_override()]
        (asked,) = BasicSweeper.split_arguments(overrides, None)
        kept: dict[tuple[str, ...], list[str]] = {}
        faults, left_out = {}, dict[str, None]()
        for job in asked:
            words, fault, without = self.applying(job, swept)
            left_out |= dict.fromkeys(without)
            if fault is not None:
                faults[" ".join(word for word in words if _key(word) in swept) or " ".join(words)] = one_line(fault)
            kept.setdefault(tuple(words), words)
        if faults:
            named = "; ".join(f"{words}: {message}" for words, message in list(faults.items())[:_SHOWN])
            more = "; …" if len(faults) > _SHOWN else ""
            raise UserError(f"{len(faults)} of {len(asked)} jobs cannot start, so none was: {named}{more}")
        for message in left_out:
            print(f"{message}: left out there")
        if len(kept) < len(asked):
            print(f"{len(asked)} jobs were asked for; {len(kept)} differ, and each is done once")
        made = list(kept.values())
        named_jobs = [self.named(job, swept) for job in made]
        return [list(each) for each in BasicSweeper.split_overrides_to_chunks(named_jobs, max_batch_size)]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: `split_arguments` has checked all jobs."""

    def jobs(self) -> list[Sequence[str]]:
        """The overrides of every job."""
        return [job for batch in self.overrides or [] for job in batch]

    def words(self, job: Sequence[str]) -> str:
        """The overrides in which a job differs from others."""
        job = [word for word in job if not word.startswith(_NAMED)]
        shared = set.intersection(*(set(each) for each in self.jobs()))
        return " ".join([word for word in job if word not in shared] or job)

    def named(self, job: Sequence[str], swept: Container[str]) -> list[str]:
        """A job with its name, noted for the table."""
        _jobs.append({_key(word): word.partition("=")[2] for word in job if _key(word) in swept})
        return [*job, _job_name(_jobs[-1])]

    def check(self, command: Command) -> None:
        """Raise UserError for a job that this sweeper cannot start."""

    def applying(self, job: list[str], swept: Sequence[str]) -> tuple[list[str], Exception | None, list[str]]:
        """A job without the swept values that have no effect on it, why it cannot start, and what has no effect."""
        left_out: list[str] = []
        while isinstance(fault := self._fault(job), NoEffect):
            useless = [word for word in job if _key(word) in swept and _sets(_key(word), fault.key)]
            if not useless:
                break
            left_out.append(str(fault))
            job = [word for word in job if word not in useless]
        return job, fault, left_out

    def _fault(self, job: Sequence[str]) -> Exception | None:
        assert self.hydra_context is not None
        assert self.config is not None
        try:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(job))
            overrides = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
            assert isinstance(overrides, list)
            with open_dict(composed):
                del composed["hydra"]
            self.check(Command.of(to_config(composed), overrides))
        except (HydraException, OmegaConfBaseException, UserError) as error:
            return error
        return None


def _key(word: str) -> str:
    """The key of an override, with its + where it has one."""
    return word.partition("=")[0]


def _sets(given: str, key: str) -> bool:
    """Whether an override of `given`, a key or a group of a key or two as `cmt`, is what sets `key`."""
    given = given.lstrip("+")
    return given == key or (given in GROUPS and key.startswith(f"{given}."))


def _job_name(values: Mapping[str, str]) -> str:
    name = cell_name(values).replace("\\", "\\\\").replace("'", "\\'")
    return f"{_NAMED}'{name or PROGRAM}'"


class _GoingOn(Launcher):
    """A launcher that keeps the errors of its jobs for the end, where Hydra would raise the first."""

    def __init__(self, launcher: Launcher, sweeper: WholeSweeper) -> None:
        self._launcher, self._sweeper = launcher, sweeper

    def setup(self, **given: Any) -> None:
        self._launcher.setup(**given)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        done = self._launcher.launch(job_overrides, initial_job_idx)
        for job, returned in zip(job_overrides, done):
            if returned.status is JobStatus.FAILED:
                _failed.append((self._sweeper.words(job), returned._return_value))
                returned.status, returned.return_value = JobStatus.COMPLETED, None
        return done
