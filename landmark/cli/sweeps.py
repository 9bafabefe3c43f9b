"""Sweeps of `-m`: all jobs are checked before the first begins, and one that fails does not end the others.

A value that has no effect on a job, as `retrieval.k` on `model=transformer`, is left out of it; of jobs that are then
the same, one is done. Each job is named by its values of what is swept.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.command import Command
from landmark.cli.composing import config_loader
from landmark.cli.launchers import Basic, CarryOut, Outcome
from landmark.cli.tasks import table
from landmark.config import Config, to_config
from landmark.config.command_line import PROGRAM, StartedJob, begin
from landmark.config.composer import Composer, one_line
from landmark.config.rows import cell_name, compose_job, named
from landmark.config.schema import GROUPS
from landmark.utils.errors import NoEffect, UserError, counted
from landmark.utils.team import started_together

Run = Callable[[Config, list[str]], object]

_SHOWN = 5  # jobs that are named before the first begins


def sweep(
    command: StartedJob, launcher: Basic, carry_out: CarryOut, run: Callable[[Config, list[str]], object]
) -> None:
    """Carry out the jobs of a command line, show the table of their records, and list the jobs that failed.

    Args:
        command: with the overrides that are swept.
        launcher: starts the jobs.
        carry_out: does one of them.
        run: carries out a task.

    Raises UserError where a job cannot start. Exits with the code of a command where one failed.
    """
    overrides = OverridesParser.create(config_loader=config_loader()).parse_overrides(command.words)
    swept = {each.get_key_element(): each for each in overrides if each.is_sweep_override()}
    _check(swept.values())
    composer = Composer(compose_job)
    words = _checked_jobs(overrides, swept, composer)
    values = [{_key(word): word.partition("=")[2] for word in job if _key(word) in swept} for job in words]
    shown = [" ".join(word for word in job if _key(word) in swept) or " ".join(job) for job in words]
    jobs = [
        replace(command, words=job, name=cell_name(each) or PROGRAM, number=number)
        for number, (job, each) in enumerate(zip(words, values))
    ]
    outcomes = launcher.launch(jobs, carry_out, Path(to_config(composer(words[0])).output) / "sweeps")
    begin(command)
    try:
        fixed = to_config(compose_job([each.input_line or "" for each in overrides if not each.is_sweep_override()]))
        team = started_together()
        has_tables = any(each.key_or_group == "experiment" for each in swept.values())  # each job shows its own
        if fixed.task == "auto" and not has_tables and (team is None or team.rank == 0):
            if not named(fixed):
                table.show_sweep(fixed, command.words, values)
            elif all(each.is_discrete_sweep() and key in ("row", *fixed.grid) for key, each in swept.items()):
                run(replace(fixed, task="table"), command.words)
    finally:
        _end({line: outcome for line, outcome in zip(shown, outcomes) if outcome.error is not None})


def _check(swept: Collection[Override]) -> None:
    for each in swept:
        if not each.is_discrete_sweep():
            raise UserError(f"{each.input_line}: has no list of values")
        if isinstance(each.value(), Glob) and not [*each.sweep_string_iterator()]:
            raise UserError(f"{each.input_line}: matches nothing in conf/{each.key_or_group}")


def _checked_jobs(overrides: Sequence[Override], swept: Collection[str], composer: Composer) -> list[list[str]]:
    """The overrides of every job. Raises UserError, naming the jobs, where one of them cannot start."""
    choices = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [each.input_line or ""]
        for each in overrides
    ]
    asked = [list(words) for words in itertools.product(*choices)]
    kept: dict[tuple[str, ...], list[str]] = {}
    faults, left_out = {}, dict[str, None]()
    for job in asked:
        words, fault, without = _applying(job, swept, composer)
        left_out |= dict.fromkeys(without)
        if fault is not None:
            faults[" ".join(word for word in words if _key(word) in swept) or " ".join(words)] = one_line(fault)
        kept.setdefault(tuple(words), words)
    if faults:
        said = "; ".join(f"{words}: {message}" for words, message in list(faults.items())[:_SHOWN])
        more = "; …" if len(faults) > _SHOWN else ""
        raise UserError(f"{len(faults)} of {len(asked)} jobs cannot start, so none was: {said}{more}")
    for message in left_out:
        print(f"{message}: left out there")
    if len(kept) < len(asked):
        print(f"{len(asked)} jobs were asked for; {len(kept)} differ, and each is done once")
    return list(kept.values())


def _applying(
    job: list[str], swept: Collection[str], composer: Composer
) -> tuple[list[str], Exception | None, list[str]]:
    """A job without the swept values that have no effect on it, why it cannot start, and what has no effect."""
    left_out: list[str] = []
    while isinstance(fault := _fault(job, composer), NoEffect):
        useless = [word for word in job if _key(word) in swept and _sets(_key(word), fault.key)]
        if not useless:
            break
        left_out.append(str(fault))
        job = [word for word in job if word not in useless]
    return job, fault, left_out


def _fault(job: list[str], composer: Composer) -> Exception | None:
    try:
        Command.of(to_config(composer(job)), job)
    except (HydraException, OmegaConfBaseException, UserError) as error:
        return error
    return None


def _end(failed: dict[str, Outcome]) -> None:
    """List the jobs that failed, and exit with the code of a command; nothing where none failed."""
    if failed:
        print(f"{counted(len(failed), 'job')} failed:", file=sys.stderr)
        for words, outcome in failed.items():
            print(f"  {words}\nerror: {outcome.error}", file=sys.stderr)
        sys.exit(min(outcome.code for outcome in failed.values()))


def _key(word: str) -> str:
    """The key of an override, with its + where it has one."""
    return word.partition("=")[0]


def _sets(given: str, key: str) -> bool:
    """Whether an override of `given`, a key or a group of a key or two as `cmt`, is what sets `key`."""
    given = given.lstrip("+")
    return given == key or (given in GROUPS and key.startswith(f"{given}."))
