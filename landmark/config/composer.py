"""Composing by Hydra: many configurations that choose the same groups, and its errors in one line."""

import copy
import difflib
import functools
import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.config.schema import GROUPS, TASKS, Config
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.source_tree import CONF

_NOISE = ("Config search path:", "provider=", "See https://", "object_type=", "full_key:", "reference_type=")


class Composer:
    """Composes as `compose` does, but calls it once for each choice of groups, and sets values on a copy."""

    def __init__(self, compose: Callable[[list[str]], DictConfig]) -> None:
        self._compose = compose
        self._made: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: list[str]) -> DictConfig:
        """Raises what `compose` raises."""
        parsed = parse(overrides)
        values = [_sets_a_value(override) for override in parsed]
        choices = tuple(line for line, is_value in zip(overrides, values) if not is_value)
        if choices not in self._made:
            self._made[choices] = self._compose(list(choices))
        config = copy.deepcopy(self._made[choices])
        try:
            for override in itertools.compress(parsed, values):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self._compose(overrides)  # raises it with more to say
        return config


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them."""
    return [_parse(override) for override in overrides]


@functools.cache
def _parse(override: str) -> Override:
    return OverridesParser.create().parse_overrides([override])[0]


def _sets_a_value(override: Override) -> bool:
    """Whether an override changes a value, and no choice of a group."""
    key = override.key_or_group
    is_group = override.package is not None or key in GROUPS or (CONF / key).is_dir()
    return override.type is OverrideType.CHANGE and not is_group


def one_line(error: BaseException) -> str:
    """The message of an error and its cause in one line, without search paths; it suggests the nearest known key."""
    if isinstance(error, UserError):
        return in_one_line(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    parts = []
    for line in [*str(error).splitlines(), *str(error.__cause__ or "").splitlines()]:
        text = " ".join(line.split())
        if text and not text.startswith(_NOISE) and not any(part.endswith(text) for part in parts):
            parts.append(text)
    text = re.sub(r":; ", ": ", "; ".join(parts))
    text = re.sub(r"(Available options in '[^']*': )(.*)", lambda m: m[1] + m[2].replace("; ", ", "), text)
    if missing := re.search(r"Key '(\w+)' not in '\w+'", text):
        given = re.search(rf"'([\w.]*\b{missing[1]})'", text)
        key, known = given[1] if given else missing[1], _keys()
        same = [each for each in known if each.endswith(f".{missing[1]}")]
        if near := same or difflib.get_close_matches(key, known, 1):
            return f"{key}: there is no such setting; did you mean {' or '.join(near)}?"
    if kind := re.search(r"Error merging override (.*); Cannot assign \w+ to (Dict|List)", text):
        return f"{kind[1]}: must be {'a mapping, as {name: value}' if kind[2] == 'Dict' else 'a list, as [value]'}"
    absent = re.search(r"Could not find '(\S+)/([^'/]+)'; Available options in '[^']*': (.*)", text)
    if absent and (near := difflib.get_close_matches(absent[2], absent[3].split(", "), 3)):
        return f"{absent[1]}={absent[2]}: there is none; did you mean {' or '.join(near)}?"
    return text


def _unreadable(override: str) -> str:
    """A message for words that Hydra's grammar cannot read: how to write them."""
    key, sign, value = override.partition("=")
    if not sign:
        kinds = {"task=": TASKS, "+experiment=": [file.stem for file in (CONF / "experiment").glob("*.yaml")]}
        meant = [f"{kind}{override}" for kind, names in kinds.items() if override in names]
        return f"{override}: is no setting, write {meant[0] if meant else 'KEY=VALUE'}"
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    written = shlex.quote(f'{key}="{quoted}"')
    return f"{key}: Hydra's grammar cannot read the value {value}; if it is a text, quote it twice: {written}"


@functools.cache
def _keys(schema: type = Config, prefix: str = "") -> list[str]:
    """All settings and groups of settings."""
    found = []
    for name, hint in get_type_hints(schema).items():
        found.append(f"{prefix}{name}")
        if is_dataclass(hint) and isinstance(hint, type):
            found += _keys(hint, f"{prefix}{name}.")
    return found
