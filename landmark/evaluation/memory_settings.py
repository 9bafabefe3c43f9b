"""A row's configuration as arguments of `landmark.memory.Memory`. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.config import Config


def memory_settings(config: Config) -> dict[str, Any]:
    """The arguments of `landmark.memory.Memory`, for a landmark model."""
    return {
        "max_blocks": config.memory.blocks,
        "k": config.retrieval.k,
        "granularity": config.retrieval.granularity,
        "scorer": config.retrieval.scorer,
        "rerank": config.retrieval.rerank,
        "recent": config.retrieval.recent,
        "first": config.retrieval.first,
        "tier": config.memory.tier,
        "folder": config.memory.folder,
        "cache": config.memory.cache,
        "index": config.memory.index,
        "index_type": config.memory.index_type,
        "candidates": config.memory.candidates,
        "cutoff": config.cmt.cutoffs or config.cmt.cutoff,
        "window": config.memory.window if config.model.as_is else None,
        "mapping": config.positions.mapping,
        "seed": config.seed,
    }
