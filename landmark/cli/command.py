"""What a command line asks for: the configuration, its rows, and the runner that makes them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.errors import HydraException

from landmark.config import Config, to_config
from landmark.config.checks import check_task
from landmark.config.command_line import override_key, suggested_command
from landmark.config.composer import one_line, parse
from landmark.config.rows import Compose, Row, compose_job, is_part, named, select
from landmark.config.schema import TASKS
from landmark.experiment.checks import check
from landmark.experiment.jobs import Job
from landmark.experiment.launches import Launch, launched
from landmark.experiment.named_runs import with_settings_of_run
from landmark.experiment.records import Contents
from landmark.experiment.runner import Runner
from landmark.results.tables import check_figure
from landmark.utils.errors import UserError

_OF_A_TASK = ("task", "output", "logger", "trainer")


@dataclass(frozen=True)
class Command:
    """overrides: those of the command line. rows: those that it asks for, composed and checked."""

    config: Config
    overrides: list[str]
    rows: list[Row]
    runner: Runner
    compose: Compose = compose_job

    @classmethod
    def of(cls, config: Config, overrides: list[str], compose: Compose = compose_job) -> "Command":
        """Raises UserError where a setting or a row makes no sense."""
        config = with_settings_of_run(config, overrides)
        if config.task not in ("auto", *TASKS):
            raise UserError(f"task={config.task}: must be one of auto, {', '.join(TASKS)}")
        check_task(config)
        _check_output(Path(config.output))
        check_figure(config.figure)
        return cls(config, overrides, select(config, overrides, compose, check), Runner(config.output), compose)

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
        """The jobs of the rows, checked. rows: others than the command's.

        Raises UserError where one of them cannot be made, before anything is trained.
        """
        jobs = self.runner.jobs(self.rows if rows is None else rows)
        self.runner.check(jobs)
        return jobs

    def launch(self) -> Launch:
        """The launch of the rows that the command line names, and of no others; prepares nothing."""
        rows: dict[str, list[Job]] = {}
        for job in (jobs := self.runner.planned_jobs(self.rows)):
            rows.setdefault(job.name, []).append(job)
        return Launch(self.config, self.overrides, self.runner.inputs.tokenizer(jobs[0].config).name, rows)

    def launches(self, contents: Contents) -> list[Launch]:
        """All launches that made rows in the output folder. One that cannot be composed is named in `damaged`."""
        found = []
        for words in launched(contents, self.runner.output, self.compose):
            try:
                other = Command.of(to_config(self.compose(words)), words, self.compose)
                found.append(replace(other, runner=self.runner).launch())
            except (HydraException, UserError) as error:
                contents.damaged.append(f"{' '.join(words)}: {one_line(error)}")
        return found

    def only_config(self) -> Config:
        """The configuration of a task that takes one trained model. Raises UserError where there are several rows."""
        if len(self.rows) > 1:
            raise UserError(f"task={self.config.task}: {len(self.rows)} rows, choose one with row=NAME")
        return self.rows[0].configs[0]

    def suggest(self, *more: str, multirun: bool = False) -> str:
        """This command line for the whole experiment, with other overrides (`more`), to be typed next."""
        parsed = parse(self.overrides)
        is_sweep = any(each.is_sweep_override() for each in parsed)
        if is_sweep and all(each.key_or_group != "experiment" for each in parsed):
            return suggested_command(*more, multirun=True)
        return suggested_command(*more, without=self.config.grid.axes, multirun=multirun)


def _check_output(folder: Path) -> None:
    """Raise UserError where a file is in the place of the folder, or the folder cannot be looked into."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"output={folder}: {place} is a file, no folder can be made there")
    if not os.access(place, os.R_OK | os.X_OK):
        raise UserError(f"output={folder}: {place} cannot be read, so what is done there is not known")
