"""One run of Weights & Biases: online only with a key, always closed. Where it fails, data stay in local files."""

import logging
import netrc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from landmark.experiment.config.schema import Config, LoggerConfig
from landmark.utils.source_tree import commit

if TYPE_CHECKING:
    from wandb import Artifact
    from wandb.sdk.wandb_run import Run

INIT_TIMEOUT = 30.0  # seconds, after which a run is kept offline
FINISH_TIMEOUT = 60.0  # seconds at the end for data that are not uploaded yet

_log = logging.getLogger(__name__)
_unreachable = False  # once W&B did not answer, this process does not wait for it again


def mode(settings: LoggerConfig) -> str:
    """online, offline or disabled: WANDB_MODE, else online iff a key is configured."""
    if settings.service != "wandb":
        return "disabled"
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


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
    """A W&B run, resumed if it exists, offline if W&B cannot be reached; closed as failed after an exception. identity:
    W&B's id, unless a sweep's agent has chosen one. job_type: train, evaluate or table.
    """
    settings = {"group": config.name, "job_type": job_type, "name": name}
    if not is_sweep_agent():
        settings |= {"project": config.logger.project, "id": identity}
    run, code = TolerantRun(_begin(config, settings)), 1
    try:
        yield run
        code = 0
    finally:
        run.finish(code)


def _begin(config: Config, settings: dict[str, Any]) -> "Run":
    """A run of W&B; where that fails, one in local files; where that fails too, one that logs nothing."""
    import wandb

    global _unreachable
    chosen: Any = "offline" if _unreachable else mode(config.logger)
    for attempt in dict.fromkeys((chosen, "offline")):
        try:
            Path(config.output).mkdir(parents=True, exist_ok=True)
            return wandb.init(
                dir=config.output,
                resume="allow",
                reinit="create_new",
                mode=attempt,
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
        except Exception as error:  # of many kinds: no network, a wrong key, a full disk
            problem = "cannot be reached, or refuses the key" if attempt == "online" else "cannot begin a run"
            kept = f"kept offline, `wandb sync {config.output}/wandb/offline-run-*` uploads it"
            told = kept if attempt == "online" else "it is left out"
            _log.warning("W&B %s (%s): %s", problem, _one_line(error), told)
            _unreachable = _unreachable or attempt == "online"
            wandb.teardown()  # W&B's service considers the identity as in use
    return wandb.init(mode="disabled")


class TolerantRun:
    """A W&B run whose methods raise nothing: the first failure is a warning, and all data stay in the run's folder."""

    def __init__(self, run: "Run") -> None:
        self._run, self._has_warned = run, False

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        with self._tolerated():
            self._run.log(values, step=step)

    def define_metric(self, name: str, **settings: Any) -> None:
        with self._tolerated():
            self._run.define_metric(name, **settings)

    def log_artifact(self, describe: "Callable[..., Artifact]", *arguments: Any) -> None:
        """Record the artifact `describe(*arguments)` as an output of the run."""
        with self._tolerated():
            self._run.log_artifact(describe(*arguments))

    def use_artifact(self, describe: "Callable[..., Artifact]", *arguments: Any) -> None:
        """Record it as an input of the run. (W&B's own `use_artifact` needs a server.)"""
        with self._tolerated():
            self._run._log_artifact(describe(*arguments), is_user_created=True, use_after_commit=True)

    def finish(self, exit_code: int) -> None:
        with self._tolerated():
            self._run.finish(exit_code=exit_code)
            if _has_errors(self._run):
                raise OSError("it did not take everything")

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many kinds: a missing file, a full disk, a server that is gone
            if not self._has_warned:
                self._has_warned, folder = True, Path(self._run.dir).parent
                upload = f"`wandb sync --include-online {folder}` uploads it"
                _log.warning("W&B: %s; what was logged is kept, %s", _one_line(error), upload)


def _has_errors(run: "Run") -> bool:
    """Whether W&B's own log of a run reports a failed upload."""
    path = Path(run.dir).parent / "logs" / "debug-internal.log"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return any('"level":"ERROR"' in line and "analytics" not in line for line in lines)


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
