"""New models, as the config group `model` describes them. The caller seeds torch's random numbers before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from landmark.models import checkpoint
from landmark.models.architecture import new_decoder
from landmark.models.config import DecoderConfig, Vocabulary, decoder_config
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
            weights). A landmark model can start from a plain one, as in the paper's fine-tuning (Section 4.2).

    Raises UserError where the model in `start` has another shape, or none is there.
    """
    config = decoder_config(model, tokenizer, cmt)
    if model.family is None and model.name is None:
        if start is None:
            return new_decoder(config)
        return _started_from(checkpoint.load(start), config, start).train()
    from landmark.models import pretrained

    if start is None:
        return pretrained.new_of_family(str(model.family), config)
    return pretrained.start_from(start, config, model.lora_rank, getattr(tokenizer, "inner", None))


def _started_from(model: LanguageModel, config: DecoderConfig, name: str) -> LanguageModel:
    """The model itself; or for a plain one that is to get landmarks, a landmark model with its weights.

    The landmark's embedding is then the mean of the others. Keys and biases of landmarks begin as in a new model: with
    the mean of its block in each key and a bias of log ℓ, landmark attention is close to the attention that the
    model has learned (`landmark.attention.keys`).

    Args:
        model: the trained model.
        config: of the model to train. Raises UserError where it has another shape.
        name: the trained model's folder.
    """
    if model.config.kind != "transformer" or config.kind != "landmark":
        checkpoint.check_same(model.config, config, where=name)
        return model
    checkpoint.check_same(model.config, config.without_landmarks(), where=name)
    started = new_decoder(config)
    started.load_state_dict({**started.state_dict(), **model.state_dict()})
    embeddings = started.input_embeddings().weight
    with torch.no_grad():
        others = torch.arange(len(embeddings), device=embeddings.device) != config.landmark_id
        embeddings[config.landmark_id] = embeddings[others].mean(0)
    return started
