"""Perplexity over segments of a stream, read in chunks with or without memory (paper, Section 4.1)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from landmark.config.schema import UNIQUE_BLOCKS
from landmark.data.evaluation_texts import segments, text_size
from landmark.evaluation.chunks import penultimate_chunk_start
from landmark.evaluation.measurement import Measurement, Progress, SegmentLosses
from landmark.evaluation.retrieval import RetrievalStatistics

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.data import Stream, Tokenizer
    from landmark.models import LanguageModel


def evaluate(
    model: LanguageModel, stream: Stream, tokenizer: Tokenizer, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """Perplexity of one row. Every segment starts with an empty memory, and with the ids that begin a text, if any.

    model: in evaluation mode. stream: the split to evaluate. progress: called with tokens read, and in all.

    Returns tokens, nll (nats per token), nll_se, perplexity, perplexity_se, bits_per_byte, word_perplexity; segments
    [[first token counted, tokens, nats]]; position_nll [[tokens, nats] for each POSITION_BIN positions of a segment];
    keys_attended and landmarks_scored (means over queries); seconds, tokens_per_second, peak_memory_bytes; memory
    (counters over all segments); and with `eval.task=unique_blocks` also retrieval (see
    `RetrievalStatistics.summary`).

    Raises UserError if the settings do not fit the split or the model.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    counted = SegmentLosses(settings.length)
    retrieval = None
    if settings.task == UNIQUE_BLOCKS:
        start = penultimate_chunk_start(model.config, settings.length, measured.local, config.retrieval.k)
        retrieval = RetrievalStatistics(start + start // (model.config.block_size or 1))
    beginning = np.array(tokenizer.beginning, dtype=np.int64)
    for numbers in measured.batches([segment.length for segment in cut]):
        batch = [cut[number] for number in numbers]
        tokens = np.stack([stream.tokens[s.start : s.start + s.length + 1] for s in batch])
        tokens = np.concatenate([np.tile(beginning, (len(batch), 1)), tokens], 1)
        losses = measured.losses(tokens, measured.new_memory(retrieval))
        for segment, loss in zip(batch, losses[:, len(beginning) :], strict=True):
            counted.add(segment.targets[0], loss, np.arange(segment.length - segment.counted, segment.length))
    entries = counted.entries()
    size = text_size(stream.tokens, [segment.targets for segment in cut], tokenizer)
    nats = entries["nll"] * entries["tokens"]
    results = {
        **entries,
        "bits_per_byte": nats / size.num_bytes / math.log(2),
        "word_perplexity": math.exp(min(700.0, nats / max(1, size.words))),
        **measured.entries(measured.done),
    }
    return results if retrieval is None else results | {"retrieval": retrieval.summary()}
