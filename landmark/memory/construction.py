"""A memory by its settings."""

from __future__ import annotations

from typing import Any

from landmark.attention.keys import Keys
from landmark.memory import select
from landmark.memory.layer import Stingy, TruePositions
from landmark.memory.memory import Memory
from landmark.memory.select import Best, Selector
from landmark.memory.settings import MemorySettings
from landmark.memory.store import Store
from landmark.memory.summaries import SummaryMemory
from landmark.utils.errors import UserError


def memory_of(block_size: int, settings: MemorySettings, **objects: Any) -> Memory | SummaryMemory:
    """A memory with these settings.

    objects: keys, gate, scoring, backend and observer, as of `Memory`. Without landmarks, with a `window`: positions,
    frequencies, unrotated_layers and observer, as of `SummaryMemory`. Raises UserError where these do not fit.
    """
    if (settings.window is None) == ("frequencies" in objects):
        has = "has no landmarks" if settings.window is None else "has landmarks"
        raise UserError(f"{settings.shown('window')}: the text that this model reads {has}")
    if settings.window is not None:
        own = {name: getattr(settings, name) for name in ("k", "window", "first", "dense", "mapping", "tier", "folder")}
        return SummaryMemory(block_size, proposed=settings.rerank or 0, **own, **objects)
    # With the mean of their blocks in them, landmarks differ in the first layer too.
    tied = (0,) if objects.setdefault("keys", Keys()).landmark == "token" else ()
    best = Best(settings.granularity, tied, settings.recent)
    selectors: dict[str, Selector] = {
        "landmark": best,
        "recent": select.Newest(settings.granularity),
        "random": select.Random(settings.granularity, settings.seed),
        "mean_key": select.MeanKeys(settings.granularity, settings.recent),
        "given": select.Given(settings.granularity),
    }
    selector = selectors[settings.scorer]
    if settings.index != "exact":
        selector = select.Faiss(kind="flat" if settings.index == "faiss_flat" else "ivf", exact=best)
    objects |= {
        "select": selector if settings.rerank is None else select.SecondLook(settings.rerank, selector),
        "store": Store(settings.max_blocks, settings.tier, settings.folder, settings.cache),
        "positions": Stingy() if settings.mapping == "stingy" else TruePositions(),
    }
    memory = Memory(block_size, settings.k, **objects)
    memory.cutoff = settings.cutoff
    return memory
