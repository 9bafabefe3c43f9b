"""Memory between the chunks of a long input: blocks with landmarks, or the last keys and values."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.memory.layer import Stingy, TruePositions
    from landmark.memory.memory import Memory
    from landmark.memory.recurrent import RecurrentMemory, SinkMemory, UnlimitedMemory
    from landmark.memory.store import Store

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
            found = import_module(f"landmark.memory.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
