"""Multi-query associative recall: how often a model gives the value of a key that it has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from landmark.data.mqar import Mqar
from landmark.data.random_numbers import sample_generator
from landmark.data.synthetic_corpus import SyntheticCorpus
from landmark.data.tokenizers import Tokenizer
from landmark.evaluation.measurement import Measurement
from landmark.evaluation.memories import new_memory
from landmark.evaluation.perplexity import inference, segment_logits
from landmark.utils.constants import NO_LOSS
from landmark.utils.significance import mean_and_error, share_interval

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel


def evaluate_mqar(
    model: LanguageModel,
    corpus: SyntheticCorpus,
    tokenizer: Tokenizer,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The share of queries in `eval.prompts` texts of `eval.length` tokens whose value is the most probable of all ids.

    Args:
        model: in evaluation mode.
        corpus: makes the texts.
        tokenizer: whose ids are keys and values.
        config: the row's settings; `eval.local` tokens are read at a time (see `chunk_length`).
        progress: called with texts read, and in all.

    Returns:
        recall, recall_low and recall_high (95 %, see `share_interval`), prompts (texts), correct [of each text], tokens
        (queries), keys_attended, landmarks_scored, seconds, tokens_per_second, peak_memory_bytes, memory.

    Raises UserError if the settings do not fit the model, or the pairs the length.
    """
    settings = config.eval
    assert isinstance(corpus.data, Mqar)
    measured = Measurement(model, config)
    local, batch_size, device = measured.local, measured.batch_size, measured.device
    drawn = [sample_generator(settings.split, settings.length, number) for number in range(settings.prompts)]
    texts = [corpus.data.text(rng, settings.length, tokenizer) for rng in drawn]
    tokens, targets = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*texts, strict=True))
    tokens = torch.nn.functional.pad(tokens, (0, 1))  # `segment_logits` does not read the last one
    right: list[int] = []
    measured.start()
    for start in range(0, len(tokens), batch_size):
        memory = new_memory(model, config)
        batch = tokens[start : start + batch_size].to(device)
        with inference(model, config):
            best = [logits.argmax(-1).cpu() for logits, _ in segment_logits(model, batch, local, memory)]
        right += (torch.cat(best, 1) == targets[start : start + batch_size]).sum(1).tolist()
        measured.add(memory)
        if progress is not None:
            progress(len(right), len(tokens))
    measured.stop()
    asked = (targets != NO_LOSS).sum(1).tolist()
    counted = [[number, queries, hits] for number, (queries, hits) in enumerate(zip(asked, right, strict=True))]
    low, high = share_interval(counted)
    return {
        "recall": mean_and_error(counted)[0],
        "recall_low": low,
        "recall_high": high,
        "prompts": len(texts),
        "correct": right,
        "tokens": sum(asked),
        **measured.entries(len(texts) * settings.length),
    }
