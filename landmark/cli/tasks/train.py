"""task=train: train the runs that the rows need, or the one of them that `run` names."""

from dataclasses import replace
from pathlib import Path

from landmark.cli.command import Command
from landmark.experiment.jobs import Run
from landmark.utils.errors import UserError


def run(command: Command) -> None:
    """Raises UserError where `run` names none of the runs, and where nothing is trained."""
    config = command.config
    rows = [replace(row, configs=[replace(one, run=None) for one in row.configs]) for row in command.rows]
    runs: dict[str, Run] = {}
    for job in command.jobs(rows):
        if (training := job.run.training) is not None:
            runs.setdefault(training.folder.name, training)
    if not runs:
        raise UserError(f"task=train: {config.name} trains nothing, its models are read as they are")
    if config.run is not None:
        name = Path(config.run).name
        if name not in runs:
            raise UserError(f"run={config.run}: no run of {config.name} (one of {', '.join(runs)})")
        runs = {name: runs[name]}
    for run in runs.values():
        is_new = command.runner.train(run)
        print(f"{run.folder}: {'trained now' if is_new else 'trained before'}")
