"""Weights & Biases: online only where a key is configured, never a prompt, closed whatever happens.

Its troubles are never those of a training: what it does not upload stays in local files, and a line says how to.
"""

import logging
import math
import netrc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlparse

from landmark.config.schema import POSITION_BIN, Config, LoggerConfig, to_dict
from landmark.tracking import artifacts
from landmark.utils.commit import commit

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from wandb import Artifact
    from wandb.sdk.wandb_run import Run

    from landmark.data import Corpus, SyntheticCorpus

INIT_TIMEOUT = 30.0  # seconds, after which a run is kept offline
FINISH_TIMEOUT = 60.0  # seconds for what is not uploaded yet at the end

_log = logging.getLogger(__name__)
_unreachable = False  # found so by this process, which then does not wait for it again


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
        session.use_artifact(artifacts.of_corpus, corpus, config.data.name)
        yield [WandbLogger(experiment=cast("Run", session))]
        session.log_artifact(artifacts.of_run, run, folder, config.logger.weights)


def log_row(config: Config, record: dict[str, Any], path: Path, *, group: str) -> None:
    """The numbers of an evaluated row, as the summary of a W&B run of its own, and its curves."""
    if mode(config.logger) == "disabled":
        return
    with _opened(config, record["id"], group=group, job_type="evaluate", name=record["labels"]["row"]) as session:
        model = Path(record["labels"]["run"])
        session.use_artifact(artifacts.of_run, record["settings"]["run"], model, config.logger.weights)
        results = record["results"]
        session.log(_numbers(results) | _numbers(results, "memory") | _numbers(results, "retrieval"))
        for name, points in (("segment/position", by_position(results)), ("layer/number", by_layer(results))):
            session.define_metric(name)
            session.define_metric(f"{name.partition('/')[0]}/*", step_metric=name, summary="none")
            for point in points:
                session.log(point)
        session.log_artifact(artifacts.of_row, path)


def by_position(results: dict[str, Any]) -> list[dict[str, float]]:
    """The curve over the tokens of a segment: what was predicted up to a position, since the one before."""
    return [
        {
            "segment/position": POSITION_BIN * number,
            "segment/nll": nats / tokens,
            "segment/perplexity": math.exp(nats / tokens),
        }
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
            session.use_artifact(artifacts.of_row, record)
        session.log({"table": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})
        for picture in [path for path in files if path.suffix == ".png"]:
            key = "positions" if picture.stem.endswith("-positions") else "picture"
            session.log({key: wandb.Image(str(picture))})
        session.log_artifact(artifacts.of_table, f"{config.name}-{files[0].stem}", files)


class Session:
    """A run of W&B that raises nothing: what fails is said once, and stays in the files of the run's folder."""

    def __init__(self, run: "Run | None") -> None:
        self._run = run
        self._said = False

    def log(self, values: dict[str, Any]) -> None:
        self._try("log", values)

    def define_metric(self, name: str, **settings: Any) -> None:
        self._try("define_metric", name, **settings)

    def log_artifact(self, describe: "Callable[..., Artifact]", *arguments: Any) -> None:
        """Note the artifact that `describe` gives as what the run made."""
        self._note("log_artifact", describe, *arguments)

    def use_artifact(self, describe: "Callable[..., Artifact]", *arguments: Any) -> None:
        """Note it as what the run builds on. W&B's own function waits for a server, and refuses without one."""
        self._note("_log_artifact", describe, *arguments, is_user_created=True, use_after_commit=True)

    def finish(self, exit_code: int) -> None:
        self._try("finish", exit_code=exit_code)
        if self._run is not None and not self._said and _has_errors(self._run):
            self._say("it did not take everything")

    def _note(self, action: str, describe: "Callable[..., Artifact]", *arguments: Any, **settings: Any) -> None:
        try:
            artifact = describe(*arguments)
        except Exception as error:  # of many kinds: a file that is gone, a full disk
            _log.warning("W&B: an artifact was not noted (%s)", _one_line(error))
        else:
            self._try(action, artifact, **settings)

    def _try(self, action: str, *arguments: Any, **settings: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, action)(*arguments, **settings)
        except Exception as error:
            if not self._said:
                self._say(_one_line(error))

    def _say(self, what: str) -> None:
        self._said = True
        folder = Path(self._run.dir).parent if self._run is not None else None
        _log.warning("W&B: %s; all is kept, `wandb sync --include-online %s` uploads it", what, folder)


@contextmanager
def _opened(
    config: Config, identity: str, *, group: str, job_type: str, name: str | None = None
) -> "Iterator[Session]":
    global _unreachable
    own = {"project": config.logger.project, "entity": config.logger.entity, "id": identity}
    settings = {"group": group, "job_type": job_type, "name": name} | ({} if sweeping() else own)
    how = "offline" if _unreachable else mode(config.logger)
    try:
        run = _start(config, how, **settings)
    except Exception as error:  # of many kinds: no network, a wrong key, a full disk
        _unreachable = _unreachable or how == "online"
        run = _offline(config, error, settings)
    session, code = Session(run), 1
    try:
        yield session
        code = 0
    finally:
        session.finish(exit_code=code)


def _start(config: Config, how: str, **settings: Any) -> "Run":
    import wandb

    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        dir=str(folder),
        resume="allow",
        reinit="create_new",
        mode=how,  # pyright: ignore[reportArgumentType]
        config=to_dict(config) | {"commit": commit()},
        settings=wandb.Settings(
            silent=True,
            console="off",
            x_disable_stats=True,
            init_timeout=INIT_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            finish_timeout_raises=True,
        ),
        **settings,
    )


def _offline(config: Config, error: Exception, settings: dict[str, Any]) -> "Run | None":
    """The same run, kept in local files; None where that fails too."""
    import wandb

    folder = Path(config.output) / "wandb"
    try:
        wandb.teardown()  # its service takes the identity for one in use
        run = _start(config, "offline", **settings)
    except Exception as second:
        _log.warning("W&B is left out: %s", _one_line(second))
        return None
    what = "cannot be reached, or refuses the key"
    _log.warning("W&B %s (%s): kept offline, `wandb sync %s/offline-run-*` uploads it", what, _one_line(error), folder)
    return run


def _has_errors(run: "Run") -> bool:
    """Whether W&B's own log of a run tells of an upload that failed."""
    try:
        lines = (Path(run.dir).parent / "logs" / "debug-internal.log").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any('"level":"ERROR"' in line and "analytics" not in line for line in lines)


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
