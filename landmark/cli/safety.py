"""What a configuration may ask of Hydra and of logging, wherever it comes from: conf/, a folder, a sweep's server.

Known settings are allowed, and all others refused. They are read as Hydra will read them, interpolations resolved. So
that nothing changes between the check and its use, an interpolation names another setting and nothing else: no
variable of the environment, no text that becomes a mapping.
"""

import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.config.schema import GROUPS, Config
from landmark.utils.errors import UserError
from landmark.utils.locations import CONF

# Hydra instantiates a `_target_`; of this package, and of Hydra and its launchers.
TARGETS = {
    "landmark.cli.main.TableAtEnd",
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",  # ours: landmark/cli/optuna_sweeper.py
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
}
# logging calls a `class`, and looks up what follows `ext://`.
LOGGERS = {"logging.StreamHandler", "logging.FileHandler", "logging.NullHandler"}
STREAMS = {"ext://sys.stdout", "ext://sys.stderr"}

_OF_LAUNCHERS = (
    *("name", "n_jobs", "verbose", "timeout", "timeout_min", "nodes", "tasks_per_node", "cpus_per_task"),
    *("cpus_per_gpu", "gpus_per_node", "gpus_per_task", "gres", "mem_gb", "mem_per_cpu", "mem_per_gpu"),
    *("partition", "qos", "account", "comment", "constraint", "exclude", "signal_delay_s", "max_num_timeout"),
    *("array_parallelism", "stderr_to_stdout"),
)
_OF_LOGGING = (
    *("version", "disable_existing_loggers", "root", "root.level", "root.handlers.*", "loggers.*.level"),
    *("loggers.*.handlers.*", "loggers.*.propagate", "formatters.*.format", "formatters.*.datefmt"),
    *("handlers.*.class", "handlers.*.stream", "handlers.*.filename", "handlers.*.formatter", "handlers.*.level"),
)
# Settings of Hydra below `hydra`; * stands for a name, ** for any number of them.
ALLOWED = (
    *("mode", "verbose", "verbose.*", "output_subdir", "run.dir", "sweep.dir", "sweep.subdir", "job.name", "job.chdir"),
    *("job.id", "job.num", "job.config_name", "job.override_dirname", "job.config.**", "callbacks", "runtime.**"),
    *("callbacks.table._target_", "sweeper._target_", "sweeper.max_batch_size", "sweeper.params", "sweeper.params.*"),
    *("sweeper.n_trials", "sweeper.n_jobs", "sweeper.seed"),
    *("launcher._target_", *(f"launcher.{key}" for key in _OF_LAUNCHERS)),
    *(f"{kind}_logging.{key}" for kind in ("hydra", "job") for key in _OF_LOGGING),
)
_REMEDIES = {
    "job.env_set": "set variables of the environment in the shell",
    "job.env_copy": "set variables of the environment in the shell",
    "launcher.setup": "run these commands in the shell that starts this one, Slurm passes its environment on",
    "searchpath": "name the folder with --config-dir",
}
_UNREAD = ("help", "hydra_help", "overrides")  # shown; composed, and checked as what they set
# They turn a text into a mapping, or read what no setting says.
RESOLVERS = ("oc.decode", "oc.create", "oc.env")
_OF_PATHS = ("run", "sweep")  # which may have the time


def check_flags(arguments: Sequence[str]) -> None:
    """Raise UserError for a setting that is written as a flag.

    And for the flag with which Hydra unpickles a configuration, or the beginning of it.
    """
    for word in arguments:
        key, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and (key in GROUPS or hasattr(Config, key) or (CONF / key).is_dir()):
            sign = "+" if key == "experiment" else ""
            raise UserError(f"{word}: settings have no dashes, write {sign}{key}={value or '…'}")
        if len(word) > 2 and "--experimental-rerun".startswith(word.partition("=")[0]):
            raise UserError(f"{word}: a pickled configuration is not read, give the settings")


def guard() -> None:
    """Have Hydra check every configuration that it composes, before it instantiates anything."""
    for resolver in RESOLVERS:
        OmegaConf.clear_resolver(resolver)
    load, search = ConfigLoaderImpl.load_configuration, ConfigLoaderImpl._process_config_searchpath
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_and_check(*arguments: Any, **settings: Any) -> DictConfig:
        try:
            composed = load(*arguments, **settings)
        except KeyError as error:  # of a variable that is not set
            raise UserError(f"hydra.job.env_copy={error.args[0]}: {_REMEDIES['job.env_copy']}") from None
        check(composed)
        return composed

    def search_here(
        self: ConfigLoaderImpl, config_name: str | None, parsed_overrides: list[Override], repo: CachingConfigRepository
    ) -> None:
        """A search path may name a package, which is imported when it is looked for."""
        found = repo.load_config(config_path=config_name) if config_name is not None else None
        own = OmegaConf.select(found.config, "hydra.searchpath") if found is not None else None
        if own or any(each.get_key_element().lstrip("+~") == "hydra.searchpath" for each in parsed_overrides):
            raise UserError(f"hydra.searchpath: {_REMEDIES['searchpath']}")
        search(self, config_name, parsed_overrides, repo)

    ConfigLoaderImpl.load_configuration = load_and_check
    ConfigLoaderImpl._process_config_searchpath = search_here


def check(composed: DictConfig) -> None:
    """Raise UserError, naming key and value, where a configuration asks for more than the allowed."""
    raw = _items(OmegaConf.to_container(composed, resolve=False))
    for path, value in sorted(raw, key=lambda item: item[0][:1] == ("hydra",)):  # which repeats the others
        if path[:2] not in [("hydra", each) for each in _UNREAD]:
            _check_interpolations(path, value)
        if path[0] != "hydra" and path[-1] == "_target_":
            raise _refused(path, value, "settings name no code")
    if "hydra" not in composed:
        return
    for path, value in _items(_resolved(composed)):
        _check_setting(path, value, composed)


def _check_setting(path: tuple[str, ...], value: Any, composed: DictConfig) -> None:
    """path: below `hydra`. value: as Hydra will read it."""
    if value is None or value == "???":
        return
    if not _is_allowed(path) and not (path[0] == "launcher" and _is_preset(path[1:], value, composed)):
        known = [remedy for key, remedy in _REMEDIES.items() if ".".join(path).startswith(key)]
        raise _refused(
            ("hydra", *path), value, known[0] if known else "is not among the settings of Hydra for use here"
        )
    if path[-1] == "_target_" and value not in TARGETS:
        raise _refused(("hydra", *path), value, "a configuration may name no code but Hydra's own")
    if not path[0].endswith("_logging"):
        return
    looked_up = re.match(r"[a-z]+://", str(value)) is not None
    if (path[-1] == "class" and value not in LOGGERS) or ((path[-1] == "stream" or looked_up) and value not in STREAMS):
        raise _refused(("hydra", *path), value, f"a log goes to {', '.join(sorted(LOGGERS | STREAMS))}")
    if path[-1] == "filename":
        file, output = Path(str(value)).absolute().resolve(), Path(str(composed.get("output"))).absolute().resolve()
        if file.suffix != ".log" or not file.is_relative_to(output):
            raise _refused(("hydra", *path), value, f"a log file is named *.log, and lies below output={output}")


def _resolved(composed: DictConfig) -> dict[str, Any]:
    """The settings below `hydra` as it will read them. Raises UserError where one cannot be known yet."""
    known = copy.deepcopy(composed)
    OmegaConf.set_readonly(known, False)
    folder = "hydra.sweep.dir" if "MULTIRUN" in str(OmegaConf.select(known, "hydra.mode")) else "hydra.run.dir"
    # Only a job will have them.
    late = {"job.id": "0", "job.num": 0, "runtime.output_dir": str(OmegaConf.select(known, folder, default="."))}
    for key, value in late.items():
        OmegaConf.update(known, f"hydra.{key}", value, force_add=True)
    settings = {}
    for key in known.hydra:
        if key in _UNREAD:
            continue
        try:
            node = known.hydra[key] if not OmegaConf.is_missing(known.hydra, key) else None
            settings[key] = OmegaConf.to_container(node, resolve=True) if isinstance(node, Container) else node
        except OmegaConfBaseException as error:
            raise UserError(f"hydra.{key}: cannot be known before a job starts: {str(error).splitlines()[0]}") from None
    return settings


def _check_interpolations(path: tuple[str, ...], value: Any) -> None:
    if not isinstance(value, str) or "${" not in value:
        return
    allowed = r"\$\{[\w.\-\[\]]+\}"
    if path[:1] == ("hydra",) and path[1:2] in [(each,) for each in _OF_PATHS]:
        allowed += r"|\$\{now:[^{}]*\}"
    if re.search(r"(?<!\\)(\\\\)*\$\{", re.sub(allowed, "", value)):
        raise _refused(path, value, "names more than another setting: write the value out, or let the shell fill it in")


def _is_allowed(path: tuple[str, ...]) -> bool:
    return any(_matches(path, tuple(pattern.split("."))) for pattern in ALLOWED)


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if pattern[-1] == "**":
        return len(path) >= len(pattern) and _matches(path[: len(pattern) - 1], pattern[:-1])
    return len(path) == len(pattern) and all(wanted in ("*", name) for name, wanted in zip(path, pattern))


def _is_preset(path: tuple[str, ...], value: Any, composed: DictConfig) -> bool:
    """Whether a setting of the launcher has the value that it has unless somebody changes it."""
    choices, store = OmegaConf.select(composed, "hydra.runtime.choices"), ConfigStore.instance()
    choice = choices and choices.get("hydra/launcher")
    if choice is None or f"{choice}.yaml" not in store.list("hydra/launcher"):
        return False
    preset = DictConfig({"hydra": {"launcher": store.load(f"hydra/launcher/{choice}.yaml").node}})
    raw = OmegaConf.to_container(preset.hydra.launcher, resolve=False)
    for name in path:
        raw = raw.get(name) if isinstance(raw, dict) else None
    if isinstance(raw, str) and "${" in raw:
        return value == raw.replace("${hydra.sweep.dir}", str(OmegaConf.select(composed, "hydra.sweep.dir")))
    return value == raw


def _items(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is neither a mapping nor a list, with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _items(each, (*path, str(key)))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _items(each, (*path, str(number)))
    else:
        yield path, value


def _refused(path: tuple[str, ...], value: Any, why: str) -> UserError:
    return UserError(f"{'.'.join(path)}={value}: {why}")
