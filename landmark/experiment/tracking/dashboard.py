"""`task=dashboard`: a W&B workspace of perplexities and trainings, by wandb-workspaces (the extra `dashboard`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from landmark.experiment.config import Config
from landmark.experiment.tracking.wandb_run import mode, project, variable
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

NUMBERS = ("eval.length", "eval.local", "retrieval.k", "memory.blocks", "cmt.cutoff")
CHOICES = ("model.kind", "retrieval.granularity", "retrieval.scorer")
TRAINING = {
    "loss, nats a token": ["train/loss", "validation/loss"],
    "validation perplexity": ["validation/perplexity"],
    "learning rate": ["train/learning_rate"],
    "gradient norm": ["train/gradient_norm"],
    "tokens a second": ["train/tokens_per_second"],
    "peak memory, bytes": ["train/peak_memory_bytes"],
}
BY_POSITION = {"perplexity": ["segment/perplexity"], "loss, nats a token": ["segment/nll"]}
BY_LAYER = {
    "distinct blocks that a chunk retrieves": ["layer/distinct_blocks"],
    "bytes that a chunk moves": ["layer/bytes_moved"],
    "share of lookups that the context miss token drops": ["layer/drop_rate"],
}


def build(config: Config, identities: Sequence[str] = ()) -> "Workspace":
    """The workspace of the project; with `identities`, of these runs alone. Raises UserError if it cannot be made."""
    try:
        from wandb_workspaces import workspaces
    except ImportError as error:
        raise UserError("task=dashboard: needs wandb-workspaces, pip install '.[dashboard]'") from error
    filters = [workspaces.Metric("ID").isin(list(identities))] if identities else []
    return workspaces.Workspace(
        entity=variable("WANDB_ENTITY") or _default_entity(config),
        project=project(config.logger),
        name=f"landmark: {config.name}" if identities else "landmark",
        sections=_sections(),
        runset_settings=workspaces.RunsetSettings(filters=filters),
    )


def write(workspace: "Workspace", path: Path) -> None:
    """Write the workspace as JSON, in W&B's own format."""
    write_atomic(path, workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")


def publish(workspace: "Workspace") -> str:
    """Save the workspace on W&B's server as a new view. Returns its address; raises UserError if the server fails."""
    try:
        return workspace.save().url
    except Exception as error:  # of wandb, requests or the server's answer
        raise UserError(f"task=dashboard: W&B did not take the workspace ({error})") from error


def _default_entity(config: Config) -> str:
    if mode(config.logger) != "online":
        return "entity"  # a placeholder: the file names no account
    import wandb

    try:
        entity = wandb.Api().default_entity
    except Exception as error:  # of wandb, requests or the server's answer
        raise UserError(f"task=dashboard: W&B was not reached ({error}): set WANDB_MODE=offline") from error
    if entity is None:
        raise UserError("task=dashboard: this key has no default entity, set WANDB_ENTITY")
    return entity


def _sections() -> "list[Section]":
    from wandb_workspaces.reports.v2.interface import (
        Config,
        LinePlot,
        ParallelCoordinatesPlot,
        ParallelCoordinatesPlotColumn,
        ScatterPlot,
        SummaryMetric,
    )
    from wandb_workspaces.workspaces import Section

    perplexity = SummaryMetric("perplexity")

    def lines(x: str, titles: dict[str, list[str]]) -> list[LinePlot]:
        return [LinePlot(title=title, x=x, y=list(metrics)) for title, metrics in titles.items()]

    columns = [ParallelCoordinatesPlotColumn(Config(key), display_name=key) for key in (*CHOICES, *NUMBERS)]
    columns.append(ParallelCoordinatesPlotColumn(perplexity, display_name="perplexity"))
    panels = {
        "Perplexity over settings": [
            ParallelCoordinatesPlot(title="settings and perplexity", columns=columns),
            *(ScatterPlot(title=f"perplexity over {key}", x=Config(key), y=perplexity) for key in NUMBERS),
        ],
        "Perplexity by position in the segment": lines("segment/position", BY_POSITION),
        "Retrieval": [
            ScatterPlot(title="perplexity over lookups dropped", x=SummaryMetric("memory/drop_rate"), y=perplexity),
            ScatterPlot(title="perplexity over keys attended", x=SummaryMetric("keys_attended"), y=perplexity),
            *lines("layer/number", BY_LAYER),
        ],
        "Training": lines("trainer/global_step", TRAINING),
    }
    return [Section(name=name, panels=list(made), is_open=True) for name, made in panels.items()]
