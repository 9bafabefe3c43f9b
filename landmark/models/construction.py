"""Freshly initialised models, as the config group `model` describes them. Seed torch's generator before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from landmark.models.config import DecoderConfig, Vocabulary, decoder_config
from landmark.models.decoder import Decoder
from landmark.models.language_model import LanguageModel
from landmark.utils.extensions import load_extension

if TYPE_CHECKING:
    from landmark.config.schema import ModelConfig


def build(model: ModelConfig, tokenizer: Vocabulary, cmt: bool = False, start: str | None = None) -> LanguageModel:
    """A model to train.

    Args:
        model: the config group `model`.
        tokenizer: gives the vocabulary and the landmark's id; for a transformers model it is saved beside the weights.
        cmt: whether the model has a context miss token.
        start: folder, or name on the hub, of a transformers model whose weights are taken (None: new weights).
    """
    config = decoder_config(model, tokenizer, cmt)
    if start is None and model.family is None:
        return new_decoder(config)
    from landmark.models import pretrained

    if start is None:
        return pretrained.new_of_family(str(model.family), config)
    return pretrained.start_from(start, config, model.lora_rank, getattr(tokenizer, "inner", None))


def new_decoder(config: DecoderConfig) -> Decoder:
    """The paper's decoder, or the `Model` of the module that `config.architecture` names.

    Raises UserError where there is no such module.
    """
    name = config.architecture
    return (Decoder if name is None else load_extension("landmark.models", name, "Model", key="model.architecture"))(
        config
    )
