"""A server that speaks OpenAI's protocol (the extra `serve`): `python -m landmark.serving MODEL`, or `make_app`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from landmark.serving.memories import ServerSettings

if TYPE_CHECKING:
    from landmark.serving.app import make_app

__all__ = ["ServerSettings", "make_app"]


def __getattr__(name: str) -> Any:
    if name != "make_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from landmark.serving.app import make_app  # it needs fastapi

    return make_app
