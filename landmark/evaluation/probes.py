"""Probes: whether a model looks back, in its window or through its memory. For any model trained on text.

`eval.probe=copy`: the loss on a stretch of text, and on the same stretch when it comes again. `eval.probe=recall`: how
often a model gives the value of a key that it has read (multi-query associative recall, Arora et al. 2023, with random
tokens that it was not trained for).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from landmark.data.evaluation_texts import probe_texts
from landmark.data.stream import Stream
from landmark.data.tokenizers import Tokenizer
from landmark.evaluation.losses import loss_entries
from landmark.evaluation.measurement import Measurement
from landmark.evaluation.memories import new_memory
from landmark.evaluation.perplexity import inference, segment_logits, token_losses
from landmark.evaluation.retrieval_map import RetrievalMap
from landmark.utils.significance import mean_and_error, share_interval

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel


def evaluate_probe(
    model: LanguageModel,
    stream: Stream,
    tokenizer: Tokenizer,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The probe `eval.probe` of one row. Every segment starts with an empty memory, and is read as for perplexity.

    Args:
        model: in evaluation mode.
        stream: the split to evaluate.
        tokenizer: of the stream; the pairs of `recall` are of its tokens.
        config: the row's settings; `eval.local` tokens are read at a time (see `chunk_length`).
        progress: called with segments read, and in all.

    Returns:
        prompts (segments); tokens, nll (nats a token), nll_se, perplexity, perplexity_se and segments [[first token
        counted, tokens, nats]], all of the second copies or of the values; keys_attended, landmarks_scored, seconds,
        tokens_per_second, peak_memory_bytes, memory.

        Of `copy` also first_copy, first_copy_se, second_copy, second_copy_se (nats a token, and standard errors over
        segments) and first_segments. Both copies are counted from their second token on. Where a memory of landmarks
        retrieves, also copy_map (see `RetrievalMap.summary`).

        Of `recall` also recall (the share of values that are the most probable of all tokens), recall_low and
        recall_high (95 %, see `share_interval`) and correct [of each segment].

    Raises UserError if the settings do not fit the split, the tokenizer or the model.
    """
    settings = config.eval
    measured = Measurement(model, config)
    local, batch_size, device = measured.local, measured.batch_size, measured.device
    texts = probe_texts(settings, stream, tokenizer)
    losses, hits = [], []
    observer = None
    if settings.probe == "copy" and model.config.kind == "landmark" and model.config.block_size is not None:
        observer = RetrievalMap(settings.length, local, model.config.block_size)
    measured.start()
    for start in range(0, len(texts.tokens), batch_size):
        tokens = torch.from_numpy(texts.tokens[start : start + batch_size]).to(device)
        memory = new_memory(model, config, observer)
        with inference(model, config):
            read = [
                (token_losses(logits, following), logits.argmax(-1) == following)
                for logits, following in segment_logits(model, tokens, local, memory)
            ]
        losses.append(torch.cat([loss for loss, _ in read], 1).double().cpu().numpy())
        hits.append(torch.cat([hit for _, hit in read], 1).cpu().numpy())
        measured.add(memory)
        if progress is not None:
            progress(min(start + batch_size, len(texts.tokens)), len(texts.tokens))
    measured.stop()

    def sums(values: list[np.ndarray], positions: range) -> list[list[float]]:
        """Of each segment; the token at position p is predicted at p − 1."""
        summed = np.concatenate(values)[:, np.asarray(positions) - 1].sum(1)
        return [[start, len(positions), value.item()] for start, value in zip(texts.starts, summed, strict=True)]

    counted = sums(losses, texts.counted)
    results = {
        "prompts": len(texts.tokens),
        **loss_entries(counted),
        # The last token of a segment is predicted and not read.
        **measured.entries(texts.tokens.size, settings.length - 1),
    }
    if settings.probe == "copy":
        compared = sums(losses, texts.compared)
        first, first_error = mean_and_error(compared)
        own = {"first_copy": first, "first_copy_se": first_error}
        own |= {"second_copy": results["nll"], "second_copy_se": results["nll_se"]}
        copy_map = None if observer is None else observer.summary(len(texts.tokens))
        own |= {"first_segments": compared} | ({} if copy_map is None else {"copy_map": copy_map})
        return results | own
    right = sums(hits, texts.counted)
    low, high = share_interval(right)
    own = {"recall": mean_and_error(right)[0], "recall_low": low, "recall_high": high}
    return results | own | {"correct": [count for *_, count in right]}
