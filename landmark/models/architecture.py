"""A decoder with new weights: the paper's, or one of your own (docs/add_a_model.md)."""

from __future__ import annotations

from landmark.models.config import DecoderConfig
from landmark.models.decoder import Decoder
from landmark.utils.extensions import load_extension


def new_decoder(config: DecoderConfig) -> Decoder:
    """The paper's decoder, or the `Model` of the module that `config.architecture` names.

    Raises UserError if there is no such module.
    """
    name = config.architecture
    if name is None:
        return Decoder(config)
    return load_extension("landmark.models", name, "Model", key="model.architecture")(config)
