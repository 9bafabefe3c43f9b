"""A message about the differences of two nested settings."""

from typing import Any


def difference(here: dict[str, Any], there: dict[str, Any]) -> str:
    """The settings that differ, as `key: value here, value there`; empty if all are equal."""
    ours, theirs = _flat(here), _flat(there)
    return "; ".join(
        f"{key}: {ours.get(key)!r} here, {theirs.get(key)!r} there"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
