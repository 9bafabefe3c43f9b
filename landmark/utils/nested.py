"""Nested settings: by dotted keys, and their differences."""

from collections.abc import Mapping
from typing import Any


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
