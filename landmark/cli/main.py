"""The command `landmark`, a Hydra program: its configuration is composed by Hydra, and `task` says what is done."""

import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from landmark import __version__
from landmark.cli import overviews, reading, sweeps, tables, teaching, terminal
from landmark.cli.command import Command
from landmark.cli.terminal import open_streams, reported
from landmark.experiment.config import Config, register, to_config
from landmark.experiment.config.command_line import started
from landmark.experiment.config.rows import Compose, compose_job, composed_again, parse, quoted
from landmark.experiment.config.schema import GROUPS
from landmark.experiment.runs.processes import joined
from landmark.experiment.runs.runner import train_here
from landmark.experiment.tracking.sweep_agent import as_hydra
from landmark.utils.collection import without_collection
from landmark.utils.errors import UserError
from landmark.utils.source_tree import CONF
from landmark.utils.team import started_together

_log = logging.getLogger(__name__)
TASKS: dict[str, Callable[[Command], object]] = {
    **{"prepare": Command.prepare, "train": Command.train, "evaluate": lambda command: command.evaluate().check()},
    **{"chat": reading.chat, "generate": reading.generate, "inspect": reading.inspect},
    **{"dashboard": overviews.show_dashboard, "plan": overviews.show_plan, "status": overviews.show_status},
    **{"table": tables.show_records, "teach": teaching.teach},
}


def main() -> None:
    """The command line `sys.argv`. Exits with a code of `landmark.cli.terminal`."""
    open_streams()
    told = os.environ.get("HYDRA_FULL_ERROR")
    terminal.in_full = told == "1"
    with reported(), without_collection():
        typed = as_hydra(sys.argv[1:])
        if typed == ["--version"]:
            print(f"landmark {__version__}, Hydra {hydra.__version__}")
            return
        _check_dashes(typed)
        is_help, config_dir = {"-h", "--help"} & {*typed}, _config_dir(typed)
        if is_help or len(typed) == (2 if "--config-dir" in typed or "-cd" in typed else bool(config_dir)):
            print(overviews.overview(config_dir))
            if not is_help:
                return
        register()
        Plugins.instance().register(Settings)
        sys.argv[1:] = typed if {"-m", "--multirun"} & {*typed} else map(_as_typed, typed)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(carry_out)()
        except Exception:
            sweeps.end()  # Hydra's callback is not called after a job that failed
            raise
        finally:
            os.environ.pop("HYDRA_FULL_ERROR")
            if told is not None:
                os.environ["HYDRA_FULL_ERROR"] = told


class Settings(SearchPathPlugin):
    """Has Hydra find conf/, even where `--config-path` names another folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if str(CONF) not in {each.path for each in search_path.get_path()}:
            search_path.append("landmark", f"file://{CONF}")


def _config_dir(typed: list[str]) -> Path | None:
    """The folder of `--config-dir`."""
    found = re.search(r"(?:^|\n)(?:--config-dir|-cd)[=\n]([^\n]*)", "\n".join(typed))
    return found and Path(found[1])


def _check_dashes(typed: list[str]) -> None:
    for word in typed:
        name, _, value = word.partition("=")
        key = name.lstrip("-")
        is_setting = key in GROUPS or key in {item.name for item in fields(Config)} or (key and (CONF / key).is_dir())
        if word.startswith("--") and is_setting:
            plus = "+" if key == "experiment" else ""
            raise UserError(f"{word}: settings have no dashes, write {plus}{key}={value or '…'}")


def _as_typed(word: str) -> str:
    """A prompt is the text that was typed, unless it has Hydra's quotes or is null: not a list, a number, a sweep."""
    if not word.startswith("prompt="):
        return word
    try:
        value = parse([word])[0].value()
    except HydraException:
        return quoted(word)
    is_quoted = isinstance(value, str) and word.partition("=")[2].startswith(("'", '"'))
    return word if value is None or is_quoted else quoted(word)


def carry_out(composed: DictConfig) -> float | None:
    """Hydra's task function, one job. Returns what sweepers minimise (see `Command.objective`)."""
    open_streams()
    gc.enable()
    job = started()
    # Processes that train together would lose each other if another job followed one that failed.
    is_last = started_together() is not None and job.launcher is None
    with (
        reported() if is_last else nullcontext(),
        sweeps.noted(job) as outcome,
        joined(lambda told: train_here(*told)) as works,
        composed_again(),
    ):
        if not works:
            return None
        command = sweeps.checked(job.words) or Command.of(to_config(composed), job.words)
        if job.number is not None and not command.is_experiment and (fault := command.unused):
            _log.warning("%s, as in another job", fault)
        carry_on(command)
        outcome.records = [record["id"] for record in command.records]
        return command.objective


def run(config: Config, overrides: list[str], compose: Compose = compose_job) -> None:
    """Carry out the task of a configuration. Raises UserError where a setting makes no sense."""
    carry_on(Command.of(config, overrides, compose))


def carry_on(command: Command) -> None:
    """Carry out the task of a command."""
    config = command.config
    if config.task != "auto":
        TASKS[config.task](command)
        return
    begun = time.monotonic()
    done = command.evaluate()
    if command.is_experiment and config.row is None:
        tables.show(command, done.records)
        total = sum(len(row.configs) for row in command.rows)
        minutes, seconds = divmod(round(time.monotonic() - begun), 60)
        duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        print(f"{done.made} of {total} rows evaluated now, the others read from records; {duration}")
    done.check()
