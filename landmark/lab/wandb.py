"""Weights & Biases: online only where a key is configured, never a prompt, closed whatever happens."""

import logging
import math
import netrc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from landmark.config import Config, LoggerConfig, to_dict
from landmark.lab import artifacts
from landmark.lab.plots.positions import BIN
from landmark.lab.provenance import commit
from landmark.lab.records import Records

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from wandb.sdk.wandb_run import Run

    from landmark.data import Corpus, SyntheticCorpus

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
def training_loggers(
    config: Config, run: str, *, group: str, corpus: "Corpus | SyntheticCorpus", folder: Path
) -> "Iterator[list[Logger]]":
    """Lightning loggers of a training, resumed under the run's identity; on the first process only.

    Its text is noted before, the model that it leaves in `folder` after it.
    """
    if mode(config.logger) == "disabled" or os.environ.get("RANK", "0") != "0":
        yield []
        return
    from lightning.pytorch.loggers import WandbLogger

    with _opened(config, run, group=group, job_type="train") as session:
        # A run that goes on logs some steps again; by a metric of its own none is dropped.
        session.define_metric("trainer/global_step")
        session.define_metric("*", step_metric="trainer/global_step")
        artifacts.use(session, artifacts.of_corpus, corpus, config.data.name)
        yield [WandbLogger(experiment=session)]
        artifacts.log(session, artifacts.of_run, run, folder, config.logger.weights)


def log_row(config: Config, record: dict[str, Any], *, group: str) -> None:
    """The numbers of an evaluated row, as the summary of a W&B run of its own, and its curves."""
    if mode(config.logger) == "disabled":
        return
    with _opened(config, record["id"], group=group, job_type="evaluate", name=record["labels"]["row"]) as session:
        model = Path(record["labels"]["run"])
        artifacts.use(session, artifacts.of_run, record["settings"]["run"], model, config.logger.weights)
        results = record["results"]
        session.log(_numbers(results) | _numbers(results, "memory") | _numbers(results, "retrieval"))
        for name, points in (("segment/position", by_position(results)), ("layer/number", by_layer(results))):
            session.define_metric(name)
            session.define_metric(f"{name.partition('/')[0]}/*", step_metric=name, summary="none")
            for point in points:
                session.log(point)
        artifacts.log(session, artifacts.of_row, Records(config.output).path("rows", record["id"]))


def by_position(results: dict[str, Any]) -> list[dict[str, float]]:
    """The curve over the tokens of a segment: what was predicted up to a position, since the one before."""
    return [
        {"segment/position": BIN * number, "segment/nll": nats / tokens, "segment/perplexity": math.exp(nats / tokens)}
        for number, (tokens, nats) in enumerate(results.get("position_nll", []), 1)
        if tokens
    ]


def by_layer(results: dict[str, Any]) -> list[dict[str, float]]:
    """What each layer retrieved, and the mean over heads of the lookups that it dropped, where these were counted."""
    layers: dict[int, dict[str, float]] = {}
    for number, layer in enumerate(results.get("retrieval", {}).get("layers", [])):
        samples = sum(layer["distinct_blocks"])
        blocks = sum(count * many for count, many in enumerate(layer["distinct_blocks"]))
        layers[number] = {"layer/distinct_blocks": blocks / samples, "layer/bytes_moved": layer["bytes_moved"]}
    for number, rates in enumerate(results.get("memory", {}).get("drop_rates", [])):
        layers.setdefault(number, {})["layer/drop_rate"] = sum(rates) / len(rates)
    return [{"layer/number": number, **layer} for number, layer in sorted(layers.items())]


def _numbers(results: dict[str, Any], part: str | None = None) -> dict[str, float]:
    """The single numbers of the results, or of a part of them."""
    found, prefix = (results, "") if part is None else (results.get(part, {}), f"{part}/")
    return {f"{prefix}{key}": value for key, value in found.items() if isinstance(value, int | float)}


def log_table(
    config: Config,
    identity: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    files: Sequence[Path],
    records: Sequence[Path],
) -> None:
    """A rendered table: its rows, the files it was written to, and the records it was made from."""
    if mode(config.logger) == "disabled":
        return
    import wandb

    with _opened(config, identity, group=config.name, job_type="table", name=config.name) as session:
        for record in records:
            artifacts.use(session, artifacts.of_row, record)
        session.log({"table": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})
        for picture in [path for path in files if path.suffix == ".png"]:
            key = "positions" if picture.stem.endswith("-positions") else "picture"
            session.log({key: wandb.Image(str(picture))})
        artifacts.log(session, artifacts.of_table, f"{config.name}-{files[0].stem}", files)


@contextmanager
def _opened(config: Config, identity: str, *, group: str, job_type: str, name: str | None = None) -> "Iterator[Run]":
    import wandb

    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    session = wandb.init(
        project=config.logger.project,
        entity=config.logger.entity,
        dir=str(folder),
        id=identity,
        name=name,
        group=group,
        job_type=job_type,
        resume="allow",
        reinit="create_new",
        mode=mode(config.logger),  # pyright: ignore[reportArgumentType]
        config=to_dict(config) | {"commit": commit()},
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    code = 1
    try:
        yield session
        code = 0
    finally:
        session.finish(exit_code=code)
