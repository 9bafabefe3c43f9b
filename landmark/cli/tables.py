"""`task=table`: print and draw the rows that have a record."""

import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from landmark.cli.command import Command
from landmark.experiment.config import Config
from landmark.experiment.config.rows import Row
from landmark.experiment.results import render, tables
from landmark.experiment.results.paper import read_paper
from landmark.experiment.runs.launches import launch_id
from landmark.experiment.runs.records import Record
from landmark.experiment.runs.runner import Runner
from landmark.experiment.tracking.wandb_run import SWEEP, mode, upload_command
from landmark.utils.errors import UserError

_NAMED = 13  # rows without a record that are named; experiments have up to 151


def show_records(command: Command) -> None:
    """Show the rows that have a whole record for each seed, and name damaged records. Raises UserError as `show`."""
    contents = command.runner.records.read_all()
    print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")
    rows: dict[str, list[Record | None]] = {}
    for job in command.runner.jobs(command.rows, prepare=False):
        rows.setdefault(job.name, []).append(contents.rows.get(job.id))
    show(command, {name: [each for each in records if each] for name, records in rows.items() if all(records)})


def show_sweep(config: Config, overrides: list[str], rows: Mapping[str, Sequence[str]]) -> None:
    """The same of a sweep without an experiment. rows: of each job its name and the identities of its records."""
    config = replace(config, name=SWEEP if config.name == Config.name else config.name)
    command = Command(config, overrides, [Row(name, [], [config]) for name in rows], Runner(config.output))
    known = command.runner.records.read_all().rows
    found = {name: [known[each] for each in identities] for name, identities in rows.items() if identities}
    show(command, found)


def show(command: Command, found: Mapping[str, Sequence[Record]]) -> None:
    """Print, draw and log the table of records, one per seed. Name the rows without one. Raises UserError for none."""
    config, names = command.config, [row.name for row in command.rows]
    missing = [name for name in names if name not in found]
    note = f"{len(missing)} of {len(names)} rows have no record yet, `{command.suggest()}` makes them: "
    note += ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
    if not found:
        raise UserError(note)
    paper = read_paper(config.name)
    compared = config.compare, config.figure, names, config.panels, config.trial
    built = tables.build(config.name, found, paper, *compared)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(f"\n{render.as_text(built, width)}")
    folder, launch = command.runner.output / "tables", launch_id(config, command.overrides)
    is_changed = not render.is_written(built, folder, launch)
    paths = render.write(built, folder, launch)
    print(f"written: {', '.join(str(path) for path in paths.values())}, and by the settings: {built.stem}-{launch}.*")
    print(f"picture: {paths['png'].resolve().as_uri()}")
    used = [record for records in found.values() for record in records]
    _log(command, built, launch, list(paths.values()), used, is_changed)
    if missing:
        print(note)


def _log(
    command: Command, table: tables.Table, launch: str, files: list[Path], records: list[Record], is_changed: bool
) -> None:
    """Log a table of a launch to W&B, unless W&B has it."""
    identity = hashlib.sha256(f"{table.name} {table.stem} {launch}".encode()).hexdigest()[:10]
    used, tracker = [command.runner.records.path("rows", record["id"]) for record in records], command.runner.tracker
    is_logged = tracker.table(command.config, identity, *render.plain(table), files, used, is_new=is_changed)
    if is_logged and mode(command.config.logger) == "offline":
        print(f"W&B: kept offline; {upload_command(command.config)} uploads it")
