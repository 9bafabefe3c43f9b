"""Landmark attention in decoders of transformers (the extra `hf`), whose AutoModelForCausalLM then opens them."""

from __future__ import annotations

from landmark.models.huggingface.landmark_cache import LandmarkCache, joined
from landmark.models.huggingface.model import LandmarkModel, LandmarkSettings
from landmark.models.huggingface.prefixes import PrefixCache
from landmark.models.huggingface.released import recover
from landmark.models.huggingface.windows import LandmarkCollator
from landmark.models.huggingface.wrapping import (
    LANDMARK,
    attach,
    load,
    place_embedding,
    register,
    unwrap,
    use_landmarks,
    wrap,
)

__all__ = [
    "LANDMARK",
    "LandmarkCache",
    "LandmarkCollator",
    "LandmarkModel",
    "LandmarkSettings",
    "PrefixCache",
    "attach",
    "joined",
    "load",
    "place_embedding",
    "recover",
    "unwrap",
    "use_landmarks",
    "wrap",
]

register()
