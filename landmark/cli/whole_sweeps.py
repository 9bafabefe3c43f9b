"""Sweeps of `-m`: all jobs are checked before the first begins, and one that fails does not end the others."""

import sys
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.command import Command
from landmark.cli.exit_codes import said
from landmark.config import to_config
from landmark.config.messages import one_line
from landmark.utils.errors import UserError

_SHOWN = 5  # jobs that are named before the first begins

_failed: list[tuple[str, Exception]] = []


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
        assert self.launcher is not None
        self.launcher = _GoingOn(self.launcher, self)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Raise UserError, naming the jobs, where one of the sweep cannot start."""
        if self.batch_index > 1:
            return
        faults = {}
        for job in self.jobs():
            if (message := self._fault(job)) is not None:
                faults[self.words(job)] = message
        if faults:
            named = "; ".join(f"{words}: {message}" for words, message in list(faults.items())[:_SHOWN])
            more = "; …" if len(faults) > _SHOWN else ""
            raise UserError(f"{len(faults)} of {len(self.jobs())} jobs cannot start, so none was: {named}{more}")

    def jobs(self) -> list[Sequence[str]]:
        """The overrides of every job."""
        return [job for batch in self.overrides or [] for job in batch]

    def words(self, job: Sequence[str]) -> str:
        """The overrides in which a job differs from others."""
        shared = set.intersection(*(set(each) for each in self.jobs()))
        return " ".join([word for word in job if word not in shared] or job)

    def _fault(self, job: Sequence[str]) -> str | None:
        assert self.hydra_context is not None
        assert self.config is not None
        try:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(job))
            overrides = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
            assert isinstance(overrides, list)
            with open_dict(composed):
                del composed["hydra"]
            Command.of(to_config(composed), overrides)
        except (HydraException, OmegaConfBaseException, UserError) as error:
            return one_line(error)
        return None


class _GoingOn(Launcher):
    """A launcher that keeps the errors of its jobs for the end, where Hydra would raise the first."""

    def __init__(self, launcher: Launcher, sweeper: WholeSweeper) -> None:
        self._launcher, self._sweeper = launcher, sweeper

    def setup(self, **given: Any) -> None:
        self._launcher.setup(**given)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        done = []
        for job, returned in zip(job_overrides, self._launcher.launch(job_overrides, initial_job_idx)):
            if returned.status is JobStatus.FAILED:
                _failed.append((self._sweeper.words(job), returned._return_value))
            else:
                done.append(returned)
        return done
