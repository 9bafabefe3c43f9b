"""Masked perplexity: hidden tokens of a text are predicted from those before and after them (paper, Appendix F).

The whole text is read at once, layer by layer. A query of a landmark model attends to its own block and to the k
others, earlier or later, whose landmarks have the highest scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from landmark.data.evaluation_texts import segments
from landmark.data.stream import Stream
from landmark.data.tokenizers import Tokenizer
from landmark.evaluation.measurement import Measurement, Progress, SegmentLosses, inference, token_losses
from landmark.extensions.masked_lm.tokens import masked_tokens

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel


def evaluate_masked(
    model: LanguageModel,
    stream: Stream,
    tokenizer: Tokenizer,
    config: Config,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Masked perplexity of one row. The same tokens are hidden for every model, and at every length.

    Args:
        model: in evaluation mode, with `masked`.
        stream: the split to evaluate.
        tokenizer: of the stream.
        config: the row's settings; `retrieval.k` blocks beside its own for a query of a landmark model.
        progress: called with tokens read, and in all.

    Returns:
        tokens (those hidden that count), nll (nats per hidden token), nll_se, perplexity, perplexity_se; segments
        [[first place counted, hidden tokens, nats]]; position_nll [[hidden tokens, nats] for each POSITION_BIN
        positions of a segment]; and the entries of `Measurement`.

    Raises UserError if the settings do not fit the split or the model.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    masks = masked_tokens(tokenizer)
    blocks = {"top_k": config.retrieval.k} if model.config.kind == "landmark" else {}
    counted = SegmentLosses(settings.length)
    for numbers in measured.batches([segment.length for segment in cut]):
        batch = [cut[number] for number in numbers]
        raw = np.stack([stream.tokens[s.start : s.start + s.length] for s in batch]).astype(np.int64)
        tokens = torch.from_numpy(raw).to(measured.device)
        shown, hidden = masks.of_text(tokens, [segment.start for segment in batch])
        with inference(model, config):
            logits = model(shown, **blocks)
            losses = token_losses(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens)
        for segment, loss, is_hidden in zip(batch, losses.cpu().numpy(), hidden.cpu().numpy(), strict=True):
            places = np.arange(segment.length - segment.counted, segment.length)
            counted.add(segment.start + segment.length - segment.counted, loss, places[is_hidden[places]])
    return counted.entries() | measured.entries(measured.done, attended=_attended(config))


def _attended(config: Config) -> tuple[float, float]:
    """Keys of normal tokens that a query attends to, and landmarks that it scores.

    A last block without a landmark is seen by its own tokens alone.
    """
    length, block = config.eval.length, config.model.block_size
    if config.model.kind != "landmark" or not block:
        return length, 0.0
    return min(length, (1 + config.retrieval.k) * block), max(0, length // block - 1)
