"""Landmark attention in decoders of Hugging Face's transformers (the optional extra `hf`), through its own extension
points: a registered attention function and a cache."""

from __future__ import annotations

from landmark.huggingface.cache import LandmarkCache
from landmark.huggingface.model import (
    LANDMARK,
    LandmarkModel,
    LandmarkSettings,
    attach,
    load,
    place_embedding,
    wrap,
)

__all__ = [
    "LANDMARK",
    "LandmarkCache",
    "LandmarkModel",
    "LandmarkSettings",
    "attach",
    "load",
    "place_embedding",
    "wrap",
]
