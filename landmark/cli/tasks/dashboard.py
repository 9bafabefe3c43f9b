"""task=dashboard: a W&B workspace of an experiment's runs and rows, or of the whole project."""

from landmark.cli.command import Command
from landmark.tracking.wandb_run import mode
from landmark.utils.errors import UserError


def run(command: Command) -> None:
    """Publish the workspace where a key is configured, else write it below the output folder."""
    from landmark.tracking import dashboard

    config, output = command.config, command.runner.output
    identities: dict[str, None] = {}
    for job in command.runner.planned_jobs(command.rows) if command.is_experiment else []:
        if not job.is_known:
            corpus = job.config.data.name
            raise UserError(f"task=dashboard: corpus {corpus} is not prepared: run task=prepare first")
        identities |= dict.fromkeys((job.run.id, job.id))
    workspace = dashboard.build(config, list(identities))
    if mode(config.logger) == "online":
        print(f"published: {dashboard.publish(workspace)}")
        return
    path = output / "dashboards" / f"{config.name if identities else 'project'}.json"
    dashboard.write(workspace, path)
    print(f"written: {path}")
    print(f"W&B: `wandb login`, `wandb sync {output}/wandb/offline-run-*`, then this command again publishes it")
