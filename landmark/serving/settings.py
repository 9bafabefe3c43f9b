"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from landmark.utils.errors import UserError


@dataclass(frozen=True)
class ServerSettings:
    """Where a server keeps memories, who may ask it, and how much.

    folder: of sessions and documents. keys: a client must send one of them; what belongs to one key, another does not
    see. body: most bytes of a request. sessions: most sessions and documents of a key. disk: most bytes of all
    memories. tokens: most tokens of an answer. requests: most that are answered at once; others wait.
    Raises UserError for values out of range.
    """

    folder: Path
    keys: tuple[str, ...]
    body: int = 16 << 20
    sessions: int = 1000
    disk: int = 64 << 30
    tokens: int = 4096
    requests: int = 256

    def __post_init__(self) -> None:
        if not self.keys or not all(self.keys):
            raise UserError("keys: a server needs at least one key that clients send; none is empty")
        for name in ("body", "sessions", "disk", "tokens", "requests"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
