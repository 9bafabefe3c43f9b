"""A decoder with new weights: the paper's, one of an extension, or one of your own (docs/add_a_model.md)."""

from __future__ import annotations

from landmark.models.config import DecoderConfig
from landmark.models.decoder import Decoder
from landmark.utils.extensions import extension_with, load_extension


def new_decoder(config: DecoderConfig) -> Decoder:
    """The paper's decoder, the `Model` of the extension whose settings are set, or that of `config.architecture`.

    Raises UserError if there is no such module.
    """
    if config.options:
        return extension_with(f"model.{next(iter(config.options))}").Model(config)
    if config.architecture is None:
        return Decoder(config)
    return load_extension("landmark.models", config.architecture, "Model", key="model.architecture")(config)
