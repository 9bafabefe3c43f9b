"""One text over several processes: a memory that is shared out, and attention to a window of which each has a part.

Torch is loaded when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.extensions.ranks.attention import attention_over_ranks as attention_over_ranks
    from landmark.extensions.ranks.memory import MemoryOverRanks as MemoryOverRanks

SETTINGS = ()
__all__ = ["MemoryOverRanks", "attention_over_ranks"]


def __getattr__(name: str) -> Any:
    if name == "MemoryOverRanks":
        from landmark.extensions.ranks.memory import MemoryOverRanks

        return MemoryOverRanks
    if name == "attention_over_ranks":
        from landmark.extensions.ranks.attention import attention_over_ranks

        return attention_over_ranks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
