"""New memories for a row's evaluation, and the sum of their counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from landmark.config.schema import memory_settings
from landmark.memory.counters import RATES
from landmark.memory.observer import Observer

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel


def new_memory(model: LanguageModel, config: Config, observer: Observer | None = None) -> Any:
    """An empty memory; None for a plain transformer of ours without a window."""
    if model.config.kind == "transformer" and config.model.name is not None:
        return model.unlimited_memory(config.eval.length)
    if model.config.kind == "transformer" and config.memory.window is not None:
        return model.new_memory(window=config.memory.window, sinks=config.memory.sinks)
    if model.config.kind != "landmark":
        return model.new_memory()
    return model.new_memory(**vars(memory_settings(config)), observer=observer)


def add_counters(total: dict[str, Any], memory: Any) -> None:
    """Add a memory's counters to `total`; of keys that end in _kept the maximum. `with_rates` computes the rates."""
    for key, value in getattr(memory, "stats", {}).items():
        if key.endswith("_kept"):
            total[key] = max(total.get(key, 0), value)
        elif key not in RATES:
            total[key] = _sum(total[key], value) if key in total else value


def _sum(a: Any, b: Any) -> Any:
    """The sum of two numbers, or of two nested lists of numbers."""
    return [_sum(*pair) for pair in zip(a, b, strict=True)] if isinstance(a, list) else a + b
