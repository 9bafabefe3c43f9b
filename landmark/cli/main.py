"""The command `landmark`: Hydra composes the configuration, and its `task` says what is done."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from landmark import __version__
from landmark.cli import overviews, reading, tables, teaching
from landmark.cli.command import Command
from landmark.cli.composing import Arguments, read_arguments, settings_found, settings_page
from landmark.cli.sweeps import chosen, sweep
from landmark.cli.terminal import open_streams, reported, show_log
from landmark.experiment.config import Config, to_config
from landmark.experiment.config.command_line import StartedJob, begin
from landmark.experiment.config.rows import Compose, compose_job
from landmark.experiment.runs.processes import joined
from landmark.experiment.runs.runner import train_here
from landmark.experiment.tracking.sweep_agent import as_hydra
from landmark.utils.errors import UserError
from landmark.utils.team import started_together

TASKS: dict[str, Callable[[Command], object]] = {
    **{"prepare": Command.prepare, "train": Command.train, "evaluate": lambda command: command.evaluate().check()},
    **{"chat": reading.chat, "generate": reading.generate, "inspect": reading.inspect},
    **{"dashboard": overviews.show_dashboard, "plan": overviews.show_plan, "status": overviews.show_status},
    **{"table": tables.show_records, "teach": teaching.teach},
}


def main() -> None:
    """The command line `sys.argv`. Exits with a code of `landmark.cli.terminal`."""
    open_streams()
    with reported():
        start(read_arguments(as_hydra(sys.argv[1:])))


def start(arguments: Arguments) -> None:
    """Show what there is, or launch what is asked for."""
    if arguments.version:
        print(f"landmark {__version__}")
        return
    if arguments.help or not arguments.words:
        print(overviews.overview(arguments.config_dir))
        if not arguments.help:
            return
    begin(StartedJob(arguments.words, arguments.config_dir))
    with settings_found():
        if arguments.help:
            print(settings_page(arguments.words))
        else:
            show_log()
            launch(arguments)


def launch(arguments: Arguments) -> None:
    """The job of a command line, or with -m its jobs and their table."""
    launcher, job = chosen(arguments.words)
    job = replace(job, config_dir=arguments.config_dir)
    if arguments.multirun:
        sweep(job, launcher, carry_out, run)
    elif job.launcher is not None:
        raise UserError(f"hydra/launcher={job.launcher}: is for sweeps, write -m before the settings")
    else:
        carry_out(job)


def carry_out(job: StartedJob) -> None:
    """One job."""
    begin(job)
    composed = compose_job(job.words)
    if composed.task in ("chat", "generate"):
        show_log(sys.stderr)  # standard output is the answer's
    # Processes that train together would lose each other if another job followed one that failed.
    is_last = started_together() is not None and job.launcher is None
    with reported() if is_last else nullcontext(), joined(lambda told: train_here(*told)) as works:
        if works:
            run(to_config(composed), job.words)


def run(config: Config, overrides: list[str], compose: Compose = compose_job) -> None:
    """Carry out the task of a configuration. Raises UserError where a setting makes no sense."""
    command = Command.of(config, overrides, compose)
    config = command.config
    if config.task != "auto":
        TASKS[config.task](command)
        return
    started = time.monotonic()
    done = command.evaluate()
    if command.is_experiment and config.row is None:
        tables.show(command, done.records)
        total = sum(len(row.configs) for row in command.rows)
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        print(f"{done.made} of {total} rows evaluated now, the others read from records; {duration}")
    done.check()
