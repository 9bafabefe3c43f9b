"""Memory between the chunks of a long input: blocks with landmarks, or the last keys and values."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.memory.landmarks.layer import Stingy, TruePositions
    from landmark.memory.landmarks.memory import Memory
    from landmark.memory.landmarks.recurrent import RecurrentMemory, SinkMemory, UnlimitedMemory
    from landmark.memory.tiers import Store

__all__ = [
    "Memory",
    "RecurrentMemory",
    "SinkMemory",
    "Stingy",
    "Store",
    "TruePositions",
    "UnlimitedMemory",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that checking settings needs no torch."""
    if name in __all__:
        from importlib import import_module

        for module in ("memory", "recurrent"):
            found = import_module(f"landmark.memory.landmarks.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
