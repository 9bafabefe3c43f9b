"""Settings: fields that say which values they can have, the check of a value, and differences. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field
from typing import Any

from landmark.utils.errors import UserError

_BOUNDS = {  # words of a bound, and whether a number is within it
    "least": ("at least", lambda number, bound: number >= bound),
    "above": ("above", lambda number, bound: number > bound),
    "most": ("at most", lambda number, bound: number <= bound),
    "below": ("below", lambda number, bound: number < bound),
}
REQUIRED: Any = "???"  # the default of a setting that has none, as OmegaConf writes it
_LARGEST = 2**63 - 1  # of a whole number, which torch and NumPy keep in 64 bits


def setting(default: Any = MISSING, **said: Any) -> Any:
    """A field whose metadata says what is known of a setting; the default None allows None. said: `choices`; bounds
    `least`, `above`, `most`, `below` of a number, or of a list's; and what other readers look for.
    """
    return field(default=default, metadata=said)


def one_of(default: Any, *choices: Any) -> Any:
    """A field that takes its default or one of these values."""
    return setting(default, choices=tuple(each for each in (default, *choices) if each not in (None, REQUIRED)))


def check_field(key: str, value: Any, item: Field) -> None:
    """`check_value` of a dataclass's field; a field of whole numbers has one, or None where its type says so."""
    is_whole = getattr(item.type, "__name__", str(item.type)).startswith("int")
    if is_whole and type(value) is not int and not (value is None and "None" in str(item.type)):
        raise UserError(f"{key}={value!r}: must be a whole number")
    check_value(key, value, item.metadata)


def check_value(key: str, value: Any, said: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for a value that is not as its field's metadata say, or that no computer has."""
    if value is None:
        return
    if (choices := said.get("choices")) and value not in choices:
        raise UserError(f"{key}={value}: must be one of {', '.join(map(str, choices))}")
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        raise UserError(f"{key}={value}: must be a list of single values")
    for each in _parts(value):
        if isinstance(each, float) and not math.isfinite(each):
            raise UserError(f"{key}={each}: must be a finite number")
        if isinstance(each, int) and abs(each) > _LARGEST:
            raise UserError(f"{key}={each}: must be a number of at most 64 bits")
        if isinstance(each, str) and ("\0" in each or each.encode(errors="ignore").decode() != each):
            raise UserError(f"{key}={each!a}: must be text in UTF-8")
    bounds = {name: said[name] for name in _BOUNDS if name in said}
    must_be = " and ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
    if bounds and value in ([], ()):
        raise UserError(f"{key}={value}: must have one number or more, {must_be}")
    for each in _parts(value) if bounds else ():
        if not isinstance(each, int | float) or isinstance(each, bool):
            raise UserError(f"{key}={value!r}: must be a number")
        if not all(_BOUNDS[name][1](each, bound) for name, bound in bounds.items()):
            raise UserError(f"{key}={value}: must be {must_be}")


def _parts(value: Any) -> Iterator[Any]:
    """The numbers and texts of a value."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(each)
    else:
        yield value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def difference(here: dict[str, Any], there: dict[str, Any]) -> str:
    """The settings that differ, as `key: value here, value there`; empty if all are equal."""
    ours, theirs = flat(here), flat(there)
    return "; ".join(
        f"{key}: {ours.get(key)!r} here, {theirs.get(key)!r} there"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    )
