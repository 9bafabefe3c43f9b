"""What a command line asks for: the configuration, its rows, and the runner that makes them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from landmark.config import Config
from landmark.config.checks import check_task
from landmark.config.command_line import override_key, suggested_command
from landmark.config.rows import Compose, Row, compose_job, is_part, named, select
from landmark.config.schema import TASKS
from landmark.experiment.checks import check
from landmark.experiment.jobs import Job
from landmark.experiment.launches import Launch, is_free_sweep, launch_of, write_launch
from landmark.experiment.named_runs import with_settings_of_run
from landmark.experiment.runner import Runner
from landmark.results.figures import check_figure
from landmark.utils.errors import UserError

_OF_A_TASK = ("task", "output", "logger", "trainer")


@dataclass(frozen=True)
class Command:
    """overrides: those of the command line. rows: those that it asks for, composed and checked."""

    config: Config
    overrides: list[str]
    rows: list[Row]
    runner: Runner

    @classmethod
    def of(cls, config: Config, overrides: list[str], compose: Compose = compose_job) -> "Command":
        """Raises UserError where a setting or a row makes no sense."""
        config = with_settings_of_run(config, overrides)
        if config.task not in ("auto", *TASKS):
            raise UserError(f"task={config.task}: must be one of auto, {', '.join(TASKS)}")
        check_task(config)
        _check_output(Path(config.output))
        check_figure(config.figure)
        return cls(config, overrides, select(config, overrides, compose, check), Runner(config.output))

    @property
    def is_experiment(self) -> bool:
        """Whether the configuration has named rows."""
        return bool(named(self.config))

    @property
    def is_whole_experiment(self) -> bool:
        return self.is_experiment and not is_part(self.config, self.overrides)

    @property
    def asks_for_all(self) -> bool:
        """Whether no setting but those of the task itself is given, so that a task covers everything in the output."""
        return all(override_key(word).partition(".")[0] in _OF_A_TASK for word in self.overrides)

    def jobs(self, rows: Sequence[Row] | None = None) -> list[Job]:
        """The jobs of the rows, checked, and noted as a launch of their experiment. rows: others than the command's.

        Raises UserError where one of them cannot be made, before anything is trained.
        """
        jobs = self.runner.jobs(self.rows if rows is None else rows)
        self.runner.check(jobs)
        if self.is_experiment:
            write_launch(self.runner.records, self._launch(jobs))
        return jobs

    def planned_launch(self) -> Launch:
        """The launch of the rows that the command line names, and of no others; prepares nothing."""
        launch = self._launch(self.runner.planned_jobs(self.rows))
        return replace(launch, rows={name: entries for name, entries in launch.rows.items() if entries})

    def only_config(self) -> Config:
        """The configuration of a task that takes one trained model. Raises UserError where there are several rows."""
        if len(self.rows) > 1:
            raise UserError(f"task={self.config.task}: {len(self.rows)} rows, choose one with row=NAME")
        return self.rows[0].configs[0]

    def suggest(self, *more: str, multirun: bool = False) -> str:
        """This command line for the whole experiment, with other overrides (`more`), to be typed next."""
        if is_free_sweep(self.overrides):
            return suggested_command(*more, multirun=True)
        return suggested_command(*more, without=self.config.grid.axes, multirun=multirun)

    def _launch(self, jobs: Sequence[Job]) -> Launch:
        return launch_of(self.config, self.overrides, self.runner.inputs.tokenizer(jobs[0].config).name, jobs)


def _check_output(folder: Path) -> None:
    """Raise UserError where a file is in the place of the folder, or the folder cannot be looked into."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"output={folder}: {place} is a file, no folder can be made there")
    if not os.access(place, os.R_OK | os.X_OK):
        raise UserError(f"output={folder}: {place} cannot be read, so what is done there is not known")
