"""The blocks of a memory, in rows on the compute device, in the CPU's memory or on disk."""

from landmark.memory.store.block_store import BlockStore
from landmark.memory.store.tiers import Store

__all__ = ["BlockStore", "Store"]
