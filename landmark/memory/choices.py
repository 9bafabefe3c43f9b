"""The choices of a memory's settings, by name. Loads no torch."""

from __future__ import annotations

GRANULARITIES = ("per_token_and_head", "per_token_and_group", "per_head", "per_token")
SCORERS = ("landmark", "recent", "random", "mean_key", "given")
TIERS = ("device", "cpu", "disk")
MAPPINGS = ("stingy", "true")
INDICES = ("exact", "faiss")
INDEX_TYPES = ("flat", "ivf")


def choosing_heads(granularity: str, heads: int, kv_heads: int) -> int:
    """How many heads, or groups of them, choose blocks of their own: H, H_kv or 1."""
    return {"per_token": 1, "per_token_and_group": kv_heads}.get(granularity, heads)
