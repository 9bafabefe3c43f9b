"""The command `landmark`: Hydra composes the configuration, and its `task` says what is done."""

import os
import sys
import time
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from landmark import __version__
from landmark.cli import launchers, safety, streams
from landmark.cli.command import Command
from landmark.cli.exit_codes import raised, reported
from landmark.cli.overview import is_empty, overview, own_folder
from landmark.cli.sweeps import check_sweeps
from landmark.cli.tasks import card, dashboard, evaluate, generate, inspect, plan, prepare, report, status, table, train
from landmark.config import Config, register, to_config
from landmark.config.command_line import launcher
from landmark.config.composer import parse
from landmark.config.rows import Compose, compose_job, named
from landmark.experiment.processes import joined
from landmark.experiment.training import train_here
from landmark.utils.locations import CONF
from landmark.utils.team import started_together

_MODULES = (card, dashboard, evaluate, generate, inspect, plan, prepare, report, status, table, train)
TASKS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def main() -> None:
    """The command line `sys.argv`. Exits with a code of `landmark.cli.exit_codes`."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # launch() raises errors, not prints them
    streams.open_streams()
    with reported():
        start(sys.argv[1:])


def start(arguments: list[str]) -> None:
    """Show what there is, or launch what is asked for."""
    if "--version" in arguments:
        print(f"landmark {__version__}")
        return
    if is_empty(arguments) or {"--help", "-h"} & set(arguments):
        print(overview(TASKS, own_folder(arguments)))
        if is_empty(arguments):
            return
    register()
    launchers.register()
    safety.guard()
    safety.check_flags(arguments)
    launchers.check(arguments)
    check_sweeps(arguments)
    # After Hydra has loaded its plugins, which replaces their classes.
    from landmark.cli import optuna_sweeper, whole_sweeps

    whole_sweeps.register()
    optuna_sweeper.register()
    try:
        launch()
    finally:
        whole_sweeps.end()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(composed: DictConfig) -> float | None:
    """One job. Returns the number of its row (`run`). The errors of a sweep's jobs are listed at its end."""
    safety.guard()  # of the processes of a launcher
    launchers.end_with_parent()
    with raised() if is_one_of_several() else reported(), joined(lambda told: train_here(*told)) as works:
        if works:
            return run(to_config(composed), list(HydraConfig.get().overrides.task))
    return None


def is_one_of_several() -> bool:
    """Whether other jobs follow this one even if it fails; processes that train together would lose each other."""
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    return launcher() is not None or (is_sweep and started_together() is None)


def run(config: Config, overrides: list[str], compose: Compose = compose_job) -> float | None:
    """Carry out the task of a configuration.

    Returns of the only row that is evaluated a number which is smaller where the row is better, else None.

    Args:
        config: what was composed.
        overrides: those of the command line.
        compose: composes a row's overrides.

    Raises UserError where a setting makes no sense.
    """
    command = Command.of(config, overrides, compose)
    config = command.config
    if config.task != "auto":
        TASKS[config.task].run(command)
        return None
    started = time.monotonic()
    done = evaluate.evaluate(command)
    if command.is_whole_experiment:
        table.show(command, done.records)
        total = sum(len(row.configs) for row in command.rows)
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        print(f"{done.made} of {total} rows evaluated now, the others read from records; {duration}")
    done.check()
    return None if command.only_row is None else evaluate.objective(done.records[command.only_row.name])


class TableAtEnd(Callback):
    """A callback of Hydra: after a multirun it prints the table of the records.

    Over rows of an experiment, or keys of its grid, that is the experiment's table; else one with a row for each job.
    """

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        team = started_together()
        if team is not None and team.rank > 0:
            return
        with reported():
            overrides = list(config.hydra.overrides.task)
            parsed = parse(overrides)
            one = to_config(compose_job([each.input_line or "" for each in parsed if not each.is_sweep_override()]))
            asked = [override for override in parsed if override.is_sweep_override()]
            if one.task != "auto":
                return
            if not named(one):
                from landmark.cli import whole_sweeps

                table.show_sweep(one, overrides, whole_sweeps.jobs())
            elif all(each.is_discrete_sweep() and each.key_or_group in ("row", *one.grid.axes) for each in asked):
                run(replace(one, task="table"), overrides)
