"""Errors of Hydra and OmegaConf in one line."""

import difflib
import re
import shlex
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hydra.errors import OverrideParseException

from landmark.config.schema import Config

_NOISE = ("Config search path:", "provider=", "See https://", "object_type=", "full_key:", "reference_type=")


def one_line(error: BaseException) -> str:
    """The message of an error and its cause in one line, without search paths; it suggests the nearest known key."""
    if isinstance(error, OverrideParseException) and "=" in error.override:
        return _unreadable(error.override)
    parts = []
    for source in (error, error.__cause__):
        for line in str(source or "").splitlines():
            text = " ".join(line.split())
            if text and not text.startswith(_NOISE) and not any(part.endswith(text) for part in parts):
                parts.append(text)
    text = re.sub(r":; ", ": ", "; ".join(parts))
    text = re.sub(r"(Available options in '[^']*': )(.*)", lambda m: m[1] + m[2].replace("; ", ", "), text)
    missing = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if missing and (near := difflib.get_close_matches(missing[1], _names(Config).get(missing[2], []), 1)):
        given = re.search(rf"'([\w.]*\b{missing[1]})'", text)
        key = given[1] if given else missing[1]
        return f"{key}: there is no such setting; did you mean {key.removesuffix(missing[1])}{near[0]}?"
    absent = re.search(r"Could not find '(\S+)/([^'/]+)'; Available options in '[^']*': (.*)", text)
    if absent and (near := difflib.get_close_matches(absent[2], absent[3].split(", "), 3)):
        return f"{absent[1]}={absent[2]}: there is none; did you mean {' or '.join(near)}?"
    return text


def _unreadable(override: str) -> str:
    """A message for a value that Hydra's grammar cannot read: which key, and how to write it."""
    key, _, value = override.partition("=")
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    written = shlex.quote(f'{key}="{quoted}"')
    return f"{key}: Hydra's grammar cannot read the value {value}; if it is a text, quote it twice: {written}"


def _names(schema: type) -> dict[str, list[str]]:
    """Field names of every group of the schema, by the name of its class."""
    found = {schema.__name__: [item.name for item in fields(schema)]}
    for hint in get_type_hints(schema).values():
        if is_dataclass(hint) and isinstance(hint, type):
            found |= _names(hint)
    return found
