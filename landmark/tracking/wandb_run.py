"""One run of Weights & Biases: online only where a key is configured, without prompts, always closed.

A failure of W&B never stops the program: the data stay in local files, and a warning names the command that uploads
them.
"""

import logging
import netrc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from landmark.config.schema import Config, LoggerConfig
from landmark.utils.source_tree import commit

if TYPE_CHECKING:
    from wandb import Artifact
    from wandb.sdk.wandb_run import Run

INIT_TIMEOUT = 30.0  # seconds, after which a run is kept offline
FINISH_TIMEOUT = 60.0  # seconds at the end for data that are not uploaded yet

_log = logging.getLogger(__name__)
_unreachable = False  # once W&B did not answer, this process does not wait for it again


def mode(settings: LoggerConfig) -> str:
    """online, offline or disabled: from the settings, else from WANDB_MODE, else online iff a key is configured."""
    if not settings.wandb:
        return "disabled"
    if settings.mode != "auto":
        return settings.mode
    if from_environment := os.environ.get("WANDB_MODE"):
        return from_environment
    return "online" if has_key() else "offline"


def is_sweep_agent() -> bool:
    """Whether the agent of a W&B sweep started this process; everything is then logged to the run of the agent."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def has_key() -> bool:
    """Whether the environment or the netrc file has a key. The key itself is not used here."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@contextmanager
def open_run(config: Config, identity: str, *, job_type: str, name: str | None = None) -> "Iterator[TolerantRun]":
    """A W&B run, resumed if it exists, and offline if W&B cannot be reached; closed as failed after an exception.

    Args:
        config: the whole configuration, logged with the run; gives group, project, entity, mode and folder.
        identity: W&B's id of the run. A sweep's agent has chosen one already, and this one is ignored.
        job_type: train, evaluate or table.
        name: shown in W&B. None: W&B chooses one.
    """
    global _unreachable
    settings = {"group": config.name, "job_type": job_type, "name": name}
    if not is_sweep_agent():
        settings |= {"project": config.logger.project, "entity": config.logger.entity, "id": identity}
    chosen = "offline" if _unreachable else mode(config.logger)
    try:
        opened = _init(config, chosen, settings)
    except Exception as error:  # of many kinds: no network, a wrong key, a full disk
        _unreachable = _unreachable or chosen == "online"
        opened = _init_offline(config, error, settings)
    run, code = TolerantRun(opened), 1
    try:
        yield run
        code = 0
    finally:
        run.finish(exit_code=code)


class TolerantRun:
    """A W&B run whose methods raise nothing: the first failure is a warning, and all data stay in the run's folder."""

    def __init__(self, run: "Run | None") -> None:
        self._run = run
        self._has_warned = False

    @property
    def last_step(self) -> int | None:
        """The last step that W&B's server has of this run, -1 if none; None where it was not asked."""
        if self._run is None or self._run.offline:
            return None
        return self._run.starting_step - 1

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self._call("log", values, step=step)

    def define_metric(self, name: str, **settings: Any) -> None:
        self._call("define_metric", name, **settings)

    def log_artifact(self, describe: "Callable[..., Artifact]", *arguments: Any) -> None:
        """Record the artifact `describe(*arguments)` as an output of the run."""
        self._record("log_artifact", describe, *arguments)

    def use_artifact(self, describe: "Callable[..., Artifact]", *arguments: Any) -> None:
        """Record it as an input of the run. (W&B's own `use_artifact` needs a server.)"""
        self._record("_log_artifact", describe, *arguments, is_user_created=True, use_after_commit=True)

    def finish(self, exit_code: int) -> None:
        self._call("finish", exit_code=exit_code)
        if self._run is not None and not self._has_warned and _has_errors(self._run):
            self._warn("it did not take everything")

    def _record(self, method: str, describe: "Callable[..., Artifact]", *arguments: Any, **settings: Any) -> None:
        try:
            artifact = describe(*arguments)
        except Exception as error:  # of many kinds: a missing file, a full disk
            _log.warning("W&B: an artifact was not recorded (%s)", _one_line(error))
        else:
            self._call(method, artifact, **settings)

    def _call(self, method: str, *arguments: Any, **settings: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*arguments, **settings)
        except Exception as error:
            if not self._has_warned:
                self._warn(_one_line(error))

    def _warn(self, problem: str) -> None:
        self._has_warned = True
        folder = Path(self._run.dir).parent if self._run is not None else None
        _log.warning("W&B: %s; all is kept, `wandb sync --include-online %s` uploads it", problem, folder)


def _init(config: Config, chosen_mode: str, settings: dict[str, Any]) -> "Run":
    import wandb

    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        dir=str(folder),
        resume="allow",
        reinit="create_new",
        mode=chosen_mode,  # pyright: ignore[reportArgumentType]
        config=asdict(config) | {"commit": commit()},
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


def _init_offline(config: Config, error: Exception, settings: dict[str, Any]) -> "Run | None":
    """The same run in local files, after `error`; None if that fails too."""
    import wandb

    try:
        wandb.teardown()  # W&B's service considers the identity as in use
        run = _init(config, "offline", settings)
    except Exception as second:
        _log.warning("W&B is left out: %s", _one_line(second))
        return None
    problem = f"cannot be reached, or refuses the key ({_one_line(error)})"
    _log.warning("W&B %s: kept offline, `wandb sync %s/wandb/offline-run-*` uploads it", problem, config.output)
    return run


def _has_errors(run: "Run") -> bool:
    """Whether W&B's own log of a run reports a failed upload."""
    try:
        lines = (Path(run.dir).parent / "logs" / "debug-internal.log").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any('"level":"ERROR"' in line and "analytics" not in line for line in lines)


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
