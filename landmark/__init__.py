"""Landmark attention: train on short windows, read any length by retrieving a few blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from landmark.utils import old_names

if TYPE_CHECKING:
    from landmark.attention import landmark_attention as landmark_attention
    from landmark.experiment.runs.loading import load as load
    from landmark.memory import Memory as Memory

old_names.install()

__version__ = "0.1.0"
_PUBLIC = {
    "landmark_attention": "landmark.attention",
    "Memory": "landmark.memory",
    "load": "landmark.experiment.runs.loading",
}
__all__ = ["Memory", "landmark_attention", "load"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that reading records needs no torch."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
