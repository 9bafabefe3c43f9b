"""Fields of dataclasses that say which values they can have, and the check of a value. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field
from typing import Any

from landmark.utils.errors import UserError

_BOUNDS = {  # words of a bound, and whether a value is within it
    "least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
}


def setting(default: Any = MISSING, **said: Any) -> Any:
    """A field whose metadata says what is known of a setting.

    Args:
        default: its usual value; None allows None, whatever else is said.
        said: `choices`, the values that it can have; `least`, `above`, `most` and `below`, bounds of a number, or of
            all numbers of a list; and what other readers of the field look for.
    """
    return field(default=default, metadata=said)


def check_value(key: str, value: Any, said: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, where a value is not as the metadata of its field says."""
    if value is None:
        return
    if (choices := said.get("choices")) and value not in choices:
        raise UserError(f"{key}={value}: must be one of {', '.join(map(str, choices))}")
    bounds = {name: said[name] for name in _BOUNDS if said.get(name) is not None}
    for number in (value if isinstance(value, list | tuple) else [value]) if bounds else []:
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise UserError(f"{key}={value!r}: must be a number")
        if not all(_BOUNDS[name][1](number, bound) for name, bound in bounds.items()):
            must_be = " and ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
            raise UserError(f"{key}={value}: must be {must_be}")
