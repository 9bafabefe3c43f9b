"""Landmark attention in decoders of Hugging Face's transformers (the optional extra `hf`).

It uses two extension points of transformers: a registered attention function and a cache.
"""

from __future__ import annotations

from landmark.huggingface.landmark_cache import LandmarkCache
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
