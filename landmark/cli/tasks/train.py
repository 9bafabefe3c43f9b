"""task=train: train the runs that the rows need, or the one of them that `run` names."""

from dataclasses import replace
from pathlib import Path

from landmark.cli.command import Command
from landmark.utils.errors import UserError


def run(command: Command) -> None:
    """Raises UserError where `run` names none of the runs."""
    config = command.config
    rows = [replace(row, configs=[replace(one, run=None) for one in row.configs]) for row in command.rows]
    jobs = {job.run.folder.name: job for job in command.jobs(rows)}
    if config.run is not None:
        name = Path(config.run).name
        if name not in jobs:
            raise UserError(f"run={config.run}: no run of {config.name} (one of {', '.join(jobs)})")
        jobs = {name: jobs[name]}
    for job in jobs.values():
        is_new = command.runner.train(job.run, job.overrides)
        print(f"{job.run.folder}: {'trained now' if is_new else 'trained before'}")
