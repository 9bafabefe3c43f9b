"""The command `landmark`: Hydra composes the configuration, and its `task` says what is done."""

import io
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from landmark.cli import launchers, safety
from landmark.cli.command import Command
from landmark.cli.exit_codes import fail, fail_storage, reported
from landmark.cli.overview import is_empty, overview, own_folder
from landmark.cli.sweeps import check_sweeps
from landmark.cli.tasks import dashboard, evaluate, generate, inspect, plan, prepare, report, status, table, train
from landmark.config import Config, register, to_config
from landmark.config.checks import check_task
from landmark.config.command_line import launcher
from landmark.config.composer import parse
from landmark.config.messages import one_line
from landmark.config.rows import Compose, compose_job, named
from landmark.experiment.named_runs import with_settings_of_run
from landmark.experiment.team import joined
from landmark.experiment.training import train_as_told
from landmark.results.figures import check_figure
from landmark.utils.errors import UserError
from landmark.utils.locations import CONF
from landmark.utils.team import started_together

_MODULES = (dashboard, evaluate, generate, inspect, plan, prepare, report, status, table, train)
TASKS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def main() -> None:
    """The command line `sys.argv`. Exits with a code of `landmark.cli.exit_codes`."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # launch() raises errors, not prints them
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, a row is seen when it is done
    arguments = sys.argv[1:]
    if is_empty(arguments) or {"--help", "-h"} & set(arguments):
        print(overview(TASKS, own_folder(arguments)))
        if is_empty(arguments):
            return
    register()
    launchers.register()
    safety.guard()
    try:
        safety.check_flags(arguments)
        launchers.check(arguments)
        check_sweeps(arguments)
        launch()
    except (HydraException, OmegaConfBaseException, UserError) as error:
        fail(one_line(error))
    except OSError as error:  # Hydra makes the output folder
        fail_storage(error)
    except Exception as error:
        if not launchers.is_lost(error):
            raise
        fail(one_line(error))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(composed: DictConfig) -> None:
    """One job. A launcher gathers the errors of the jobs that it started, and `main` reports them."""
    safety.guard()  # of the processes of a launcher
    with nullcontext() if launcher() else reported(), joined(train_as_told) as works:
        if works:
            run(to_config(composed), list(HydraConfig.get().overrides.task))


def run(config: Config, overrides: list[str], compose: Compose = compose_job) -> None:
    """Carry out the task of a configuration.

    Args:
        config: what was composed.
        overrides: those of the command line.
        compose: composes a row's overrides.

    Raises UserError where a setting makes no sense.
    """
    config = with_settings_of_run(config, overrides)
    check_task(config)
    check_figure(config.figure)
    command = Command.of(config, overrides, compose)
    if config.task != "auto":
        TASKS[config.task].run(command)
        return
    started = time.monotonic()
    records, new = evaluate.run(command)
    if command.is_whole_experiment:
        table.show(command, records)
        total = sum(len(row.configs) for row in command.rows)
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        print(f"{new} of {total} rows evaluated now, the others read from records; {duration}")


class TableAtEnd(Callback):
    """A callback of Hydra: after a multirun over rows, or keys of the grid, it prints the table of the records."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        team = started_together()
        if team is not None and team.rank > 0:
            return
        with reported():
            overrides = list(config.hydra.overrides.task)
            parsed = parse(overrides)
            one = to_config(compose_job([each.input_line or "" for each in parsed if not each.is_sweep_override()]))
            swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
            if one.task == "auto" and named(one) and swept <= {"row", *one.grid.axes}:
                run(replace(one, task="table"), overrides)
