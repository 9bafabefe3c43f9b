"""The decoder with its three kinds of attention, and its checkpoints. Torch is loaded when a name is first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.models.checkpoint import build, load, save
    from landmark.models.config import DecoderConfig, decoder_config
    from landmark.models.decoder import Decoder
    from landmark.models.language_model import LanguageModel as LanguageModel

__all__ = ["Decoder", "DecoderConfig", "build", "decoder_config", "load", "save"]


def __getattr__(name: str) -> Any:
    if name in (*__all__, "LanguageModel"):
        from importlib import import_module

        for module in ("config", "checkpoint"):  # in this order: the configuration needs no torch
            found = import_module(f"landmark.models.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
