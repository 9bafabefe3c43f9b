"""New models, as the config group `model` describes them. The caller seeds torch's random numbers before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from landmark.models import checkpoint
from landmark.models.architecture import new_decoder
from landmark.models.config import Vocabulary, decoder_config
from landmark.models.language_model import LanguageModel

if TYPE_CHECKING:
    from landmark.config.schema import ModelConfig


def build(model: ModelConfig, tokenizer: Vocabulary, cmt: bool = False, start: str | None = None) -> LanguageModel:
    """A model to train.

    Args:
        model: the config group `model`.
        tokenizer: has the vocabulary and the landmark's id; with `start`, a transformers tokenizer is saved with the
            model.
        cmt: whether the model has a context miss token.
        start: folder of a model whose training is continued, or of one of transformers its name on the hub (None: new
            weights).

    Raises UserError where the model in `start` has another shape, or none is there.
    """
    config = decoder_config(model, tokenizer, cmt)
    if model.family is None and model.name is None:
        if start is None:
            return new_decoder(config)
        return checkpoint.load(start, config).train()
    from landmark.models import pretrained

    if start is None:
        return pretrained.new_of_family(str(model.family), config)
    return pretrained.start_from(start, config, model.lora_rank, getattr(tokenizer, "inner", None))
