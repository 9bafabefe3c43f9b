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
from landmark.huggingface.released import recover

__all__ = [
    "LANDMARK",
    "LandmarkCache",
    "LandmarkModel",
    "LandmarkSettings",
    "attach",
    "load",
    "place_embedding",
    "recover",
    "wrap",
]
