"""A hierarchy of landmarks: groups of blocks, groups of such groups, … have gates too (gates.py).

A query of a memory then looks for the best groups, and in them for the best blocks (selector.py). Torch is loaded when
it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from landmark.config.schema import memory_settings
from landmark.memory.settings import MemorySettings
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.config import Config

SETTINGS = ("model.fan_out", "model.levels")
_FIXED = ("granularity", "scorer", "recent", "index", "max_blocks")  # of a memory; others would need another search


def check(config: Config) -> None:
    """Raise UserError for settings that do not fit groups of landmarks."""
    options = {"fan_out": config.model.fan_out, "levels": config.model.levels}
    check_model(config.model.kind, config.model.alpha or 0.0, config.model.backend, options)
    check_memory(memory_settings(config))


def check_model(kind: str, alpha: float, backend: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for groups of a wrong size, or in a model without landmarks or with other gates.

    Args:
        kind: of the model.
        alpha: of the gate.
        backend: of attention.
        options: fan_out, and perhaps levels.
    """
    fan_out, levels = options.get("fan_out"), options.get("levels")
    if fan_out is None:
        raise UserError(f"model.levels={levels}: are levels of groups of landmarks, set model.fan_out")
    if fan_out < 2 or (levels is not None and levels < 1):
        raise UserError(f"model.fan_out={fan_out}, model.levels={levels}: must be at least 2 and 1")
    if kind != "landmark" or alpha or backend == "triton":
        raise UserError(
            f"model.fan_out={fan_out}: needs model=landmark, model.alpha=0 and model.backend=auto, "
            f"not {kind}, {alpha} and {backend}"
        )


def check_memory(settings: MemorySettings) -> None:
    """Raise UserError for settings of a memory that cannot be searched through groups."""
    for name in _FIXED:
        if name in settings.saved():
            only = MemorySettings().shown(name)
            raise UserError(f"{settings.shown(name)}: with model.fan_out blocks are found by their groups, set {only}")


def __getattr__(name: str) -> Any:
    if name == "Model":
        from landmark.extensions.hierarchy.model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
