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
    keys = objects.setdefault("keys", Keys())
    objects |= {
        "select": _selector(settings, keys),
        "store": Store(settings.max_blocks, settings.tier, settings.folder, settings.cache),
        "positions": Stingy() if settings.mapping == "stingy" else TruePositions(),
    }
    memory = Memory(block_size, settings.k, **objects)
    memory.cutoff = settings.cutoff
    return memory


def _selector(settings: MemorySettings, keys: Keys) -> Selector:
    granularity = settings.granularity
    # With the mean of their blocks in them, landmarks differ in the first layer too.
    best = Best(granularity, (0,) if keys.landmark == "token" else (), settings.recent)
    new = {
        "landmark": lambda: best,
        "recent": lambda: select.Newest(granularity),
        "random": lambda: select.Random(granularity, settings.seed),
        "mean_key": lambda: select.MeanKeys(granularity, settings.recent),
        "given": lambda: select.Given(granularity),
    }
    found: Selector = new[settings.scorer]()
    if settings.index != "exact":
        found = select.Faiss(kind="flat" if settings.index == "faiss_flat" else "ivf", exact=best)
    return found if settings.rerank is None else select.SecondLook(settings.rerank, found)
