"""Landmark attention in decoders of transformers (the extra `hf`), whose AutoModelForCausalLM then opens them."""

from __future__ import annotations

from landmark.huggingface.landmark_cache import LandmarkCache, joined
from landmark.huggingface.model import LandmarkModel, LandmarkSettings
from landmark.huggingface.prefixes import PrefixCache
from landmark.huggingface.released import recover
from landmark.huggingface.windows import LandmarkCollator
from landmark.huggingface.wrapping import LANDMARK, attach, load, place_embedding, register, unwrap, wrap

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
    "wrap",
]

register()
