"""Perplexity over segments of a stream, read in chunks with or without memory (paper, Section 4.1)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.data.bytes_and_words import text_size
from landmark.data.evaluation_texts import segments
from landmark.data.stream import Stream
from landmark.data.tokenizers import Tokenizer
from landmark.evaluation.chunks import penultimate_chunk_start
from landmark.evaluation.losses import SegmentLosses
from landmark.evaluation.measurement import Measurement
from landmark.evaluation.memories import new_memory
from landmark.evaluation.retrieval_statistics import RetrievalStatistics

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel


def evaluate(
    model: LanguageModel,
    stream: Stream,
    tokenizer: Tokenizer,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Perplexity of one row. Every segment starts with an empty memory, and with the ids that begin a text, if any.

    Args:
        model: in evaluation mode.
        stream: the split to evaluate.
        tokenizer: of the stream, to count bytes and words of the text.
        config: the row's settings; `eval.local` tokens are read at a time (see `chunk_length`).
        progress: called with predictions done, and in all.

    Returns:
        tokens, nll (nats per token), nll_se, perplexity, perplexity_se, bits_per_byte, word_perplexity; segments
        [[first token counted, tokens, nats]]; position_nll [[tokens, nats] for each POSITION_BIN positions of a
        segment]; keys_attended and landmarks_scored (means over queries); seconds, tokens_per_second,
        peak_memory_bytes; memory (counters over all segments); and with `eval.retrieval_statistics` also retrieval
        (see `RetrievalStatistics.summary`).

    Raises UserError if the settings do not fit the split or the model.
    """
    settings = config.eval
    measured = Measurement(model, config)
    local, batch_size, device = measured.local, measured.batch_size, measured.device
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    counted = SegmentLosses(settings.length)
    retrieval = None
    if settings.retrieval_statistics:
        start = penultimate_chunk_start(model.config, settings.length, local, config.retrieval.k)
        retrieval = RetrievalStatistics(start + start // (model.config.block_size or 1))
    done, total = 0, sum(segment.counted for segment in cut)
    beginning = np.array(tokenizer.beginning, dtype=np.int64)
    measured.start()
    for start in range(0, len(cut), batch_size):
        batch = cut[start : start + batch_size]
        tokens = np.stack([stream.tokens[s.start : s.start + s.length + 1] for s in batch]).astype(np.int64)
        tokens = np.concatenate([np.tile(beginning, (len(batch), 1)), tokens], 1)
        memory = new_memory(model, config, retrieval)
        with inference(model, config):
            losses = segment_losses(model, torch.from_numpy(tokens).to(device), local, memory).cpu().numpy()
            losses = losses[:, len(beginning) :]  # of the text
        for segment, loss in zip(batch, losses, strict=True):
            counted.add(segment.targets[0], loss, np.arange(segment.length - segment.counted, segment.length))
        measured.add(memory)
        done += sum(segment.counted for segment in batch)
        if progress is not None:
            progress(done, total)
    measured.stop()
    entries = counted.entries()
    size, nats = text_size(stream.tokens, [segment.targets for segment in cut], tokenizer), entries["nll"] * done
    results = {
        **entries,
        "bits_per_byte": nats / size.num_bytes / math.log(2),
        "word_perplexity": math.exp(min(700.0, nats / max(1, size.words))),
        **measured.entries(sum(s.length for s in cut)),
    }
    return results if retrieval is None else results | {"retrieval": retrieval.summary()}


def segment_losses(model: LanguageModel, tokens: Tensor, local: int, memory: Any) -> Tensor:
    """Loss of each prediction, (B, L) float64 nats.

    Args:
        model: in evaluation mode.
        tokens: (B, L+1) raw ids of segments.
        local: tokens that are read at a time.
        memory: empty, for the whole batch (None: nothing is kept between chunks).
    """
    losses = [token_losses(logits, following) for logits, following in segment_logits(model, tokens, local, memory)]
    return torch.cat(losses, 1).double()


def segment_logits(model: LanguageModel, tokens: Tensor, local: int, memory: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunk by chunk the logits (B, C, vocabulary), in float32 or better, and the tokens that follow (B, C).

    Args:
        model: in evaluation mode.
        tokens: (B, L+1) raw ids of segments.
        local: tokens that are read at a time.
        memory: empty, for the whole batch (None: nothing is kept between chunks).
    """
    for chunk, following in zip(tokens[:, :-1].split(local, 1), tokens[:, 1:].split(local, 1), strict=True):
        logits = model(chunk, memory=memory)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        yield logits, following


def token_losses(logits: Tensor, following: Tensor) -> Tensor:
    """Loss of each prediction, (B, C) nats. logits: (B, C, vocabulary). following: (B, C), the right tokens."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(following)


@contextlib.contextmanager
def inference(model: LanguageModel, config: Config) -> Iterator[None]:
    """Without gradients; on a GPU in the precision of the training."""
    half = next(model.parameters()).device.type == "cuda" and config.train.precision == "bf16-mixed"
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
        yield
