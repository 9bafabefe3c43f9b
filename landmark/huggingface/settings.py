"""How a model of transformers reads with landmarks, as its config.json has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SETTINGS = "landmark"  # in a model's configuration, and so in its config.json


@dataclass(frozen=True)
class LandmarkSettings:
    """How a model reads with landmarks.

    token: id of the landmark; None: the text has no landmarks, and blocks are found by a summary of their keys.
    block_size: ℓ. local: tokens of a text read at a time. memory: settings of a memory, by
    the names of `landmark.memory.settings.SETTINGS`.
    """

    token: int | None
    block_size: int
    local: int
    memory: dict[str, Any] = field(default_factory=dict)
