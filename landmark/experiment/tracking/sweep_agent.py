"""What the agent of a W&B sweep writes as values of Python, in Hydra's words."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

from landmark.experiment.config.rows import quoted
from landmark.experiment.config.schema import GROUPS, Config

_WORD = re.compile(r"([+]{,2}[\w./@]+)=(.+)", re.DOTALL)


def as_hydra(words: Sequence[str]) -> list[str]:
    """The words of an agent's command line: nested parameters (`a={'b': 1}`) are a word each (`a.b=1`), None is
    null, True and False are on and off for a group of these options, and 4.0 is 4 for a setting that is an integer.
    """
    return [made for word in words for made in _of_hydra(word)]


def _of_hydra(word: str) -> Iterator[str]:
    found = _WORD.fullmatch(word)
    try:
        value = ast.literal_eval(found[2]) if found else ""
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = ""
    if found and (value is None or isinstance(value, bool | float | dict | list)):
        yield from _assigned(found[1], value)
    else:
        yield word


def _assigned(key: str, value: Any) -> Iterator[str]:
    name = key.lstrip("+")
    if isinstance(value, dict) and value:
        for inner, own in value.items():
            yield from _assigned(f"{key}.{inner}", own)
        return
    if isinstance(value, bool) and "on" in GROUPS.get(name, {}):
        value = "on" if value else "off"
    elif isinstance(value, float) and value.is_integer() and _is_integer(name):
        value = int(value)
    yield quoted(f"{key}={value}") if isinstance(value, str) and name not in GROUPS else f"{key}={_written(value)}"


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _is_integer(key: str) -> bool:
    """Whether a setting is an integer, or none."""
    kind: Any = Config
    for name in key.split("."):
        kind = get_type_hints(kind).get(name) if isinstance(kind, type) else None
    return int in (kind, *get_args(kind)) and float not in get_args(kind)
