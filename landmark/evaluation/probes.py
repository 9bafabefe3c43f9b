"""Probes: whether a model looks back, in its window or through its memory.

Any model trained on text has `eval.task=copy`: the loss on a stretch of text and on the same stretch when it comes
again. `data=mqar` trains for multi-query associative recall (Arora et al. 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from landmark.data.evaluation_texts import copies
from landmark.data.mqar import Mqar
from landmark.data.random_numbers import sample_generator
from landmark.evaluation.measurement import Measurement, Progress, loss_entries, token_losses
from landmark.evaluation.retrieval import RetrievalMap
from landmark.utils.constants import NO_LOSS
from landmark.utils.significance import mean_and_error, share_interval

if TYPE_CHECKING:
    from torch import Tensor

    from landmark.config import Config
    from landmark.data import Stream, SyntheticCorpus, Tokenizer
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
    texts = copies(settings, stream)
    count, length = texts.tokens.shape
    losses, observer = np.zeros((count, length - 1)), None
    if model.config.kind == "landmark" and model.config.block_size is not None:
        observer = RetrievalMap(settings.length, measured.local, model.config.block_size)
    for numbers in measured.batches([length] * count):
        (losses[numbers],) = measured.read(texts.tokens[numbers], measured.new_memory(observer), token_losses)

    def sums(positions: range) -> list[list[float]]:
        """Of each segment; the token at position p is predicted at p − 1."""
        summed = losses[:, np.asarray(positions) - 1].sum(1)
        return [[start, len(positions), value.item()] for start, value in zip(texts.starts, summed, strict=True)]

    second, compared = loss_entries(sums(texts.counted)), sums(texts.compared)
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


def evaluate_mqar(
    model: LanguageModel,
    corpus: SyntheticCorpus,
    tokenizer: Tokenizer,
    config: Config,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The share of queries in `eval.prompts` texts of `eval.length` tokens whose value is the most probable of all ids.

    The tokenizer's ids are keys and values; texts are read as in `evaluate`.

    Returns recall, recall_low and recall_high (95 %, see `share_interval`), prompts (texts), correct [of each text],
    tokens (queries), keys_attended, landmarks_scored, seconds, tokens_per_second, peak_memory_bytes, memory.

    Raises UserError if the settings do not fit the model, or the pairs the length.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    assert isinstance(corpus.data, Mqar)
    drawn = [sample_generator(settings.split, settings.length, number) for number in range(settings.prompts)]
    texts = [corpus.data.text(rng, settings.length, tokenizer) for rng in drawn]
    tokens, targets = (np.stack(arrays) for arrays in zip(*texts, strict=True))
    tokens = np.pad(tokens, ((0, 0), (0, 1)))  # the last one is not read
    right = np.zeros(len(texts), dtype=int)
    for numbers in measured.batches([settings.length] * len(texts)):
        (best,) = measured.read(tokens[numbers], measured.new_memory(), _best)
        right[numbers] = (best == targets[numbers]).sum(1)
    asked = (targets != NO_LOSS).sum(1).tolist()
    counted = [[*each] for each in zip(range(len(texts)), asked, right.tolist(), strict=True)]
    low, high = share_interval(counted)
    return {
        **{"recall": mean_and_error(counted)[0], "recall_low": low, "recall_high": high, "correct": right.tolist()},
        "prompts": len(texts),
        "tokens": sum(asked),
        **measured.entries(measured.done),
    }


def _best(logits: Tensor, _: Tensor) -> Tensor:
    """The most probable ids."""
    return logits.argmax(-1)
