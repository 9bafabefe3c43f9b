"""One run of Weights & Biases: online only with a key, always closed. Where it fails, data stay in local files."""

import functools
import logging
import netrc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from landmark.experiment.config.command_line import is_sweep_agent, started
from landmark.experiment.config.schema import Config, LoggerConfig
from landmark.utils.source_tree import commit

if TYPE_CHECKING:
    from wandb import Artifact
    from wandb.sdk.wandb_run import Run

INIT_TIMEOUT = 30.0  # seconds, after which a run is kept offline
FINISH_TIMEOUT = 60.0  # seconds at the end for data that are not uploaded yet
MODES = {"online": "online", "run": "online", "shared": "shared", "offline": "offline", "dryrun": "offline"}
MODES |= {"disabled": "disabled"}  # the values of WANDB_MODE
SWEEP = "sweep"  # the group of a sweep without an experiment, and the name of its table
WITHOUT_EFFECT = ("WANDB_RUN_ID", "WANDB_RESUME")
_TRUE = ("1", "on", "true", "yes")
_WHERE = ("WANDB_MODE", "WANDB_BASE_URL")  # malformed, they do not say where data may go

_log = logging.getLogger(__name__)
_unreachable = False  # once W&B did not answer, this process does not wait for it again
_has_told = False  # where runs go


def mode(settings: LoggerConfig) -> str:
    """online, shared, offline or disabled: WANDB_MODE, else online iff a key is configured. Offline, with a warning, if
    WANDB_MODE or WANDB_BASE_URL is malformed.
    """
    if settings.service != "wandb" or os.environ.get("WANDB_DISABLED", "").lower() in _TRUE:
        return "disabled"
    chosen = MODES.get(os.environ.get("WANDB_MODE", ""))
    if chosen != "disabled" and any(variable(name) is None for name in _WHERE if os.environ.get(name)):
        return "offline"
    return chosen or ("online" if has_key() else "offline")


def variable(name: str) -> str | None:
    """A variable of the environment; None where it is absent, empty or malformed, of which a warning is shown once."""
    value = os.environ.get(name)
    return value if value and _is_fit(name, value) else None


@functools.cache
def _is_fit(name: str, value: str) -> bool:
    if name == "WANDB_API_KEY" or (name == "WANDB_MODE" and value in MODES):
        return True  # without an import that takes a second, and no key in a message
    import wandb

    try:
        wandb.Settings().update_from_env_vars({name: value})
    except Exception as error:  # of pydantic or W&B
        lines = str(error).splitlines()
        reason = lines[min(2, len(lines) - 1)].strip().partition(" [type=")[0].removeprefix("Value error, ")
        then = "W&B's data stay in local files" if name in _WHERE else "it is left out"
        _log.warning("W&B: %s=%s is malformed (%s): %s", name, value, reason.rstrip("."), then)
        return False
    return True


def project(settings: LoggerConfig) -> str:
    """`logger.project`, or WANDB_PROJECT where that is the default."""
    is_chosen = settings.project != LoggerConfig.project
    return settings.project if is_chosen else variable("WANDB_PROJECT") or settings.project


def place(config: Config) -> Path:
    """W&B's folder: below WANDB_DIR, else below the output folder."""
    return Path(variable("WANDB_DIR") or config.output) / "wandb"


def upload_command(config: Config) -> str:
    """The command that uploads what is kept offline."""
    return f"`wandb sync {place(config)}/offline-run-*`"


def has_key() -> bool:
    """Whether the environment or the netrc file has a key. The key itself is not used here."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(variable("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@contextmanager
def open_run(config: Config, identity: str, *, job_type: str, name: str | None = None) -> "Iterator[TolerantRun]":
    """A W&B run, resumed if it exists, offline if W&B cannot be reached; closed as failed after an exception. identity:
    W&B's id, unless a sweep's agent has chosen one. job_type: train, evaluate or table. W&B's variables WANDB_NAME,
    WANDB_RUN_GROUP and WANDB_JOB_TYPE come before these.
    """
    settings = {
        "group": variable("WANDB_RUN_GROUP") or group(config),
        "job_type": variable("WANDB_JOB_TYPE") or job_type,
        "name": variable("WANDB_NAME") or name,
    }
    if not is_sweep_agent():
        settings |= {"project": project(config.logger), "id": identity}
    chosen = mode(config.logger)  # by the variables that are malformed too
    with _fit_environment():
        begun = _begin(config, chosen, settings)
    run, code = TolerantRun(begun), 1
    try:
        yield run
        code = 0
    finally:
        run.finish(code)


def group(config: Config) -> str:
    """The experiment's name. Jobs of a sweep without an experiment have the group of their table."""
    is_of_a_sweep = config.name == Config.name and started().number is not None
    return SWEEP if is_of_a_sweep else config.name


@contextmanager
def _fit_environment() -> Iterator[None]:
    """The environment without variables that are malformed: W&B would not begin."""
    unfit = {name: value for name, value in os.environ.items() if name.startswith("WANDB_") and value}
    unfit = {name: value for name, value in unfit.items() if not _is_fit(name, value)}
    for name in unfit:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(unfit)


def _begin(config: Config, chosen: Any, settings: dict[str, Any]) -> "Run":
    """A run of W&B in the chosen mode; where that fails, one in local files; where that too, one that logs nothing."""
    import wandb

    global _unreachable
    folder = place(config).parent
    for attempt in dict.fromkeys(("offline" if _unreachable else chosen, "offline")):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = wandb.init(
                dir=str(folder),
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
            problem = "cannot begin a run" if attempt == "offline" else "cannot be reached, or refuses the key"
            told = "it is left out" if attempt == "offline" else f"kept offline, {upload_command(config)} uploads it"
            _log.warning("W&B %s (%s): %s", problem, _one_line(error), told)
            _unreachable = _unreachable or attempt != "offline"
            wandb.teardown()  # W&B's service considers the identity as in use
        else:
            _tell(config, run, attempt)
            return run
    return wandb.init(mode="disabled")


def _tell(config: Config, run: "Run", attempt: str) -> None:
    """Say once where the runs of this process go, and which variables do not act."""
    global _has_told
    if _has_told:
        return
    _has_told = True
    if attempt == "offline":
        _log.info("W&B: offline in %s, %s uploads it", place(config), upload_command(config))
    else:
        weights = "with weights" if config.logger.weights else "without weights"
        _log.info("W&B: online, %s, %s", run.project_url or f"project {run.project}", weights)
    if not is_sweep_agent() and (unused := [name for name in WITHOUT_EFFECT if os.environ.get(name)]):
        _log.warning("W&B: %s has no effect: a run has the identity of its training, row or table", ", ".join(unused))


class TolerantRun:
    """A W&B run whose methods raise nothing: the first failure is a warning, and all data stay in the run's folder."""

    def __init__(self, run: "Run") -> None:
        self._run, self._has_warned = run, False

    @property
    def is_kept(self) -> bool:
        """Whether it logs to W&B or to local files."""
        return not self._run.disabled

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
