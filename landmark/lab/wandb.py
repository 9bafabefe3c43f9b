"""Weights & Biases: online only where a key is configured, never a prompt, closed whatever happens.

Its troubles are never those of a training: what it does not upload stays in local files, and a line says how to.
"""

import logging
import netrc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlparse

from landmark.config import Config, LoggerConfig, to_dict

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from wandb.sdk.wandb_run import Run

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
        yield [WandbLogger(experiment=cast("Run", session))]


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


class Session:
    """A run of W&B that raises nothing: what fails is said once, and stays in the files of the run's folder."""

    def __init__(self, run: "Run | None") -> None:
        self._run = run
        self._said = False

    def log(self, values: dict[str, Any]) -> None:
        self._try("log", values)

    def define_metric(self, name: str, **settings: Any) -> None:
        self._try("define_metric", name, **settings)

    def finish(self, exit_code: int) -> None:
        self._try("finish", exit_code=exit_code)
        if self._run is not None and not self._said and _has_errors(self._run):
            self._say("it did not take everything")

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
        config=to_dict(config),
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
