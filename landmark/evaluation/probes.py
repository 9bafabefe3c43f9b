"""The probe `eval.task=copy`: whether a model looks back, in its window or through its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from landmark.data.evaluation_texts import copies
from landmark.evaluation.measurement import Measurement, Progress, loss_entries
from landmark.evaluation.retrieval import RetrievalMap
from landmark.utils.significance import mean_and_error

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.data import Stream
    from landmark.models import LanguageModel


def evaluate_copy(
    model: LanguageModel, stream: Stream, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """The loss on stretches of text that come twice. Every segment starts with an empty memory, as in `evaluate`.

    Returns:
        prompts (segments); tokens, nll (nats a token), nll_se, perplexity, perplexity_se and segments [[first token
        counted, tokens, nats]], all of the second copies; first_copy, first_copy_se, second_copy, second_copy_se (nats
        a token, and standard errors over segments) and first_segments; keys_attended, landmarks_scored, seconds,
        tokens_per_second, peak_memory_bytes, memory. Both copies are counted from their second token on. Where a memory
        of landmarks retrieves, also copy_map (see `RetrievalMap.summary`).

    Raises UserError if the settings do not fit the split or the model.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    tokens, starts = copies(settings, stream)
    count, length = tokens.shape
    losses, observer = np.zeros((count, length - 1)), None
    if model.config.kind == "landmark" and model.config.block_size is not None:
        observer = RetrievalMap(settings.length, measured.local, model.config.block_size)
    for numbers in measured.batches([length] * count):
        losses[numbers] = measured.losses(tokens[numbers], measured.new_memory(observer))

    def sums(copy: int) -> list[list[float]]:
        """Of each segment, from the second token of a copy on; the token at position p is predicted at p − 1."""
        summed = losses[:, copy * length // 2 :][:, : length // 2 - 1].sum(1)
        return [[start + 1, length // 2 - 1, value.item()] for start, value in zip(starts, summed, strict=True)]

    second, compared = loss_entries(sums(1)), sums(0)
    first, first_error = mean_and_error(compared)
    copy_map = None if observer is None else observer.summary(count)
    return {
        "prompts": count,
        **second,
        # The last token of a segment is predicted and not read.
        **measured.entries(measured.done, settings.length - 1),
        **{"first_copy": first, "first_copy_se": first_error, "first_segments": compared},
        **{"second_copy": second["nll"], "second_copy_se": second["nll_se"]},
        **({} if copy_map is None else {"copy_map": copy_map}),
    }
