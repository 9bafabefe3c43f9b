"""Which code a configuration may name, wherever it comes from: conf/, another folder, or the server of a sweep."""

from collections.abc import Iterator
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from landmark.utils.errors import UserError

# Hydra instantiates a `_target_`; of this package, and of Hydra and its launchers.
TARGETS = {
    "landmark.cli.main.TableAtEnd",
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
}
# logging calls a `()` or a `class`, and looks up what follows `ext://`.
LOGGING = {"hydra.job_logging", "hydra.hydra_logging"}
LOGGERS = {
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "ext://sys.stdout",
    "ext://sys.stderr",
}
# They turn a text into a mapping, and so into a `_target_`.
RESOLVERS = ("oc.decode", "oc.create")


def guard() -> None:
    """Have Hydra check every configuration that it composes, before it instantiates anything."""
    for resolver in RESOLVERS:
        OmegaConf.clear_resolver(resolver)
    load = ConfigLoaderImpl.load_configuration

    def load_and_check(*arguments: Any, **settings: Any) -> DictConfig:
        composed = load(*arguments, **settings)
        check(composed)
        return composed

    ConfigLoaderImpl.load_configuration = load_and_check


def check(composed: DictConfig) -> None:
    """Raise UserError, naming key and value, where a configuration names other code than the allowed."""
    for path, value in _items(OmegaConf.to_container(composed, resolve=False)):
        key = path.rpartition(".")[2]
        if key == "_target_" and value not in TARGETS:
            raise UserError(f"{path}={value}: a configuration may name no code but Hydra's own")
        if path.startswith(tuple(f"{each}." for each in LOGGING)):
            called = key in ("()", "class", "_target_") or str(value).startswith(("ext://", "cfg://"))
            if called and value not in LOGGERS:
                raise UserError(f"{path}={value}: a log goes to {', '.join(sorted(LOGGERS))}")
        if path.startswith("hydra.job.env_set."):
            raise UserError(f"{path}={value}: set variables of the environment in the shell")


def _items(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is neither a mapping nor a list, with the path of its keys."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _items(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _items(each, f"{path}.{number}")
    else:
        yield path, value
