"""Weights & Biases: online only where a key is configured, never a prompt, closed whatever happens."""

import logging
import netrc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from landmark.config import Config, LoggerConfig, to_dict

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from wandb.sdk.wandb_run import Run

_log = logging.getLogger(__name__)


def mode(settings: LoggerConfig) -> str:
    """online, offline or disabled: as set here, else by WANDB_MODE, else online iff a key is configured."""
    if not settings.wandb:
        return "disabled"
    if settings.mode != "auto":
        return settings.mode
    if named := os.environ.get("WANDB_MODE"):
        return named
    return "online" if has_key() else "offline"


def sweeping() -> bool:
    """Whether the agent of a W&B sweep started this process: all it logs belongs to the run that the agent names."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def has_key() -> bool:
    """Whether a key stands in the environment or in the netrc file; it is not read further."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@contextmanager
def training_loggers(config: Config, run: str, *, group: str) -> "Iterator[list[Logger]]":
    """Lightning loggers of a training, resumed under the run's identity; on the first process only."""
    if mode(config.logger) == "disabled" or os.environ.get("RANK", "0") != "0":
        yield []
        return
    from lightning.pytorch.loggers import WandbLogger

    with _opened(config, run, group=group, job_type="train") as session:
        # A run that goes on logs some steps again; by a metric of its own none is dropped.
        session.define_metric("trainer/global_step")
        session.define_metric("*", step_metric="trainer/global_step")
        yield [WandbLogger(experiment=session)]


def log_row(config: Config, record: dict[str, Any], *, group: str) -> None:
    """The numbers of an evaluated row, as the summary of a W&B run of its own."""
    if mode(config.logger) == "disabled":
        return
    with _opened(config, record["id"], group=group, job_type="evaluate", name=record["labels"]["row"]) as session:
        results = record["results"]
        counted = {f"memory/{key}": value for key, value in results.get("memory", {}).items()}
        session.log({key: value for key, value in (results | counted).items() if isinstance(value, int | float)})


def log_table(
    config: Config, identity: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], picture: Path | None
) -> None:
    """A rendered table and its picture."""
    if mode(config.logger) == "disabled":
        return
    import wandb

    with _opened(config, identity, group=config.name, job_type="table", name=config.name) as session:
        session.log({"table": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})
        if picture is not None:
            session.log({"picture": wandb.Image(str(picture))})


@contextmanager
def _opened(config: Config, identity: str, *, group: str, job_type: str, name: str | None = None) -> "Iterator[Run]":
    import wandb

    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"project": config.logger.project, "entity": config.logger.entity, "id": identity}
    session = wandb.init(
        **({} if sweeping() else own),
        dir=str(folder),
        name=name,
        group=group,
        job_type=job_type,
        resume="allow",
        reinit="create_new",
        mode=mode(config.logger),  # pyright: ignore[reportArgumentType]
        config=to_dict(config),
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    code = 1
    try:
        yield session
        code = 0
    finally:
        session.finish(exit_code=code)
