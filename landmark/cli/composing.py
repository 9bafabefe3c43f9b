"""Hydra composes the settings here, and nothing else: what files and words say is data, no class or job begins."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from landmark.experiment.config import Config, register
from landmark.experiment.config.command_line import PROGRAM, started
from landmark.experiment.config.rows import compose_job, parse, quoted
from landmark.experiment.config.schema import GROUPS
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import open_written
from landmark.utils.source_tree import CONF

_DEEPEST = 50  # levels of a file of settings
# They turn a text into a mapping, or read what no setting says: a variable of the environment may be a secret.
_RESOLVERS = ("oc.decode", "oc.create", "oc.env")


@dataclass
class Arguments:
    """A command line: its overrides, the folder of `--config-dir`, and other flags."""

    words: list[str] = field(default_factory=list)
    config_dir: Path | None = None
    multirun: bool = False
    help: bool = False
    version: bool = False


_FLAGS = {
    **dict.fromkeys(("-m", "--multirun"), "multirun"),
    **dict.fromkeys(("-h", "--help"), "help"),
    "--version": "version",
}


def read_arguments(given: Sequence[str]) -> Arguments:
    """Raises UserError for a flag that there is not, one of Hydra's that runs or shows something included."""
    read, rest = Arguments(), iter(given)
    for word in rest:
        name, sign, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = value if sign else next(rest, "")
            if not folder or not Path(folder).is_dir():
                raise UserError(f"{name} {folder}: is not a folder")
            read.config_dir = Path(folder).absolute()
        elif word in _FLAGS:
            setattr(read, _FLAGS[word], True)
        elif word.startswith("-"):
            key, known = name.lstrip("-"), ", ".join(["--config-dir", *_FLAGS])
            if key not in GROUPS and not hasattr(Config, key) and not (key and (CONF / key).is_dir()):
                raise UserError(f"{word}: there is no such flag, only {known}")
            raise UserError(
                f"{word}: settings have no dashes, write {'+' if key == 'experiment' else ''}{key}={value or '…'}"
            )
        else:
            read.words.append(word)
    read.words = [word if read.multirun else _as_typed(word) for word in read.words]
    return read


def _as_typed(word: str) -> str:
    """A prompt is the text that was typed, unless it has Hydra's quotes or is null: not a list, a number, a sweep."""
    if not word.startswith("prompt="):
        return word
    try:
        value = parse([word])[0].value()
    except HydraException:
        return quoted(word)
    is_quoted = isinstance(value, str) and word.partition("=")[2].startswith(("'", '"'))
    return word if value is None or is_quoted else quoted(word)


@contextmanager
def settings_found() -> Iterator[None]:
    """Have Hydra find the settings of the package, and after them those of the folder that `--config-dir` names."""
    register()
    for plugin in (_OwnFolder, _OwnSource):
        Plugins.instance().register(plugin)
    with initialize_config_dir(str(CONF), job_name=PROGRAM, version_base="1.3"):
        for resolver in _RESOLVERS:
            OmegaConf.clear_resolver(resolver)
        yield


class _OwnFolder(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (own := started().config_dir) is not None:
            search_path.append("command-line", f"own://{own}")


class _OwnSource(FileConfigSource):
    """Files of settings in one's own folder, which may be somebody else's."""

    @staticmethod
    def scheme() -> str:
        return "own"

    def load_config(self, config_path: str) -> ConfigResult:
        """Raises UserError for a file that is no YAML, or has aliases, by which some lines can fill the memory."""
        path, depth = Path(self.path) / self._normalize_file_name(config_path), 0
        try:
            if path.exists():
                with open_written(path, "name another --config-dir") as file:
                    content = file.read()
                for event in yaml.parse(content):
                    depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                    if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                        raise UserError(f"{path}: has an alias (*NAME), or is nested too deep: repeat the lines")
            return super().load_config(config_path)
        except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path} cannot be read: {in_one_line(error)[:300]}") from error


def config_loader() -> ConfigLoader:
    """What finds groups and their options, while the settings are found."""
    return GlobalHydra.instance().config_loader()


def settings_page(words: list[str]) -> str:
    """Every group with its options, and every setting with its value, as these overrides compose them."""
    settings = OmegaConf.to_yaml(compose_job(words))
    for item in fields(Config):  # a line of meaning for each part
        if is_dataclass(kind := item.default_factory):
            settings = settings.replace(f"\n{item.name}:\n", f"\n{item.name}:  # {str(kind.__doc__).splitlines()[0]}\n")
    head = "Settings (change one with key=value; docs/settings.md says what each is for)"
    return "\n".join(["", "Groups (choose one with group=option):", "", *_groups(), "", f"{head}:", "", settings])


def _groups(parent: str = "") -> Iterator[str]:
    for name in config_loader().list_groups(parent):
        group = f"{parent}/{name}" if parent else name
        if group == "hydra":
            continue
        if options := config_loader().get_group_options(group):
            yield f"{group}: {', '.join(sorted(options))}"
        yield from _groups(group)
