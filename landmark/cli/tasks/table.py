"""task=table: print and draw the table of the rows that have a record."""

import hashlib

from landmark.cli.command import Command
from landmark.experiment.records import Record
from landmark.results import render, tables
from landmark.results.paper import read_paper
from landmark.tracking.wandb_run import mode
from landmark.utils.errors import UserError


def run(command: Command) -> None:
    """Raises UserError where no row has a record; rows without one are named below the table."""
    config, names = command.config, [row.name for row in command.rows]
    made = command.planned_launch().found(command.runner.records.read_all())
    found = {name: made[name] for name in names if name in made}
    missing = [name for name in names if name not in found]
    note = f"{len(missing)} of {len(names)} rows have no record yet, `{command.suggest()}` makes them: "
    note += ", ".join(missing)
    if not found:
        raise UserError(note)
    built = tables.build(
        config.name,
        found,
        paper=read_paper(config.name),
        comparisons=config.compare,
        figure=config.figure,
        cells={row.name: row.cell for row in command.rows if row.cell is not None},
    )
    print(f"\n{render.as_text(built)}")
    folder = command.runner.output / "tables"
    is_changed = not render.is_written(built, folder)
    paths = render.write(built, folder)
    print(f"written: {', '.join(str(path) for path in paths.values())}")
    if is_changed:
        _log(command, built, list(paths.values()), [record for records in found.values() for record in records])
    if missing:
        print(note)


def _log(command: Command, table: tables.Table, files: list, records: list[Record]) -> None:
    """Log a table that has changed to W&B."""
    identity = hashlib.sha256(f"{table.name} {table.stem}".encode()).hexdigest()[:10]
    used = [command.runner.records.path("rows", record["id"]) for record in records]
    command.runner.tracker.table(command.config, identity, *render.plain(table), files, used)
    if mode(command.config.logger) == "offline":
        print(f"W&B: kept offline; `wandb sync {command.runner.output}/wandb/offline-run-*` uploads it")
