"""The command `landmark`, a Hydra program: its configuration is composed by Hydra, and `task` says what is done."""

import gc
import logging
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from landmark import __version__
from landmark.cli import sweeps, terminal
from landmark.cli.chat import chat
from landmark.cli.question import Question, generate
from landmark.cli.terminal import open_streams, reported
from landmark.experiment.config import Config, register, to_config
from landmark.experiment.config.command_line import is_sweep_agent, started
from landmark.experiment.config.rows import Compose, compose_job, composed_again, parse, quoted
from landmark.experiment.config.schema import GROUPS
from landmark.utils.collection import without_collection
from landmark.utils.errors import UserError
from landmark.utils.source_tree import CONF
from landmark.utils.team import started_together

if TYPE_CHECKING:
    from landmark.cli.command import Command

_log = logging.getLogger(__name__)


def main() -> None:
    """The command line `sys.argv`. Exits with a code of `landmark.cli.terminal`."""
    open_streams()
    told = os.environ.get("HYDRA_FULL_ERROR")
    terminal.in_full = told == "1"
    with reported(), without_collection():
        typed = sys.argv[1:]
        if is_sweep_agent():
            from landmark.experiment.tracking.sweep_agent import as_hydra

            typed = as_hydra(typed)
        if typed == ["--version"]:
            print(f"landmark {__version__}, Hydra {hydra.__version__}")
            return
        _check_dashes(typed)
        is_help, config_dir = {"-h", "--help"} & {*typed}, _config_dir(typed)
        if is_help or len(typed) == (2 if "--config-dir" in typed or "-cd" in typed else bool(config_dir)):
            from landmark.cli.overviews import overview

            print(overview(config_dir))
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
    with reported() if is_last else nullcontext(), sweeps.noted(job) as outcome, _as_team() as works, composed_again():
        if not works:
            return None
        asked = sweeps.asked_before(job.words) or sweeps.asked_by(to_config(composed), job.words)
        if job.number is not None and not asked.is_experiment and (fault := asked.unused):
            _log.warning("%s, as in another job", fault)
        carry_on(asked)
        outcome.records = [record["id"] for record in asked.records]
        return asked.objective


def _as_team() -> AbstractContextManager[bool]:
    """Whether this process has to work: of several that train together the first."""
    if started_together() is None:
        return nullcontext(True)
    from landmark.experiment.runs.processes import as_team
    from landmark.experiment.runs.runner import train_here

    return as_team(lambda told: train_here(*told))


def run(config: Config, overrides: list[str], compose: Compose = compose_job) -> None:
    """Carry out the task of a configuration. Raises UserError where a setting makes no sense."""
    carry_on(sweeps.asked_by(config, overrides, compose))


def carry_on(asked: "Question | Command") -> None:
    """Answer a question, or do with the rows of a command what its task says."""
    if isinstance(asked, Question):
        (chat if asked.config.task == "chat" else generate)(asked.config)
        return
    from landmark.cli import tasks

    tasks.carry_on(asked)
