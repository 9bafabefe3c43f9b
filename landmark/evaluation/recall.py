"""Accuracy of answers to prompts of synthetic data: pass keys (paper, Figure 3), key-value pairs."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from landmark.data.synthetic_corpus import SyntheticCorpus
from landmark.data.tokenizer import Tokenizer
from landmark.evaluation.chunks import attention_size, chunk_length
from landmark.evaluation.memories import add_counters, new_memory
from landmark.evaluation.perplexity import TOKENS_AT_ONCE
from landmark.memory.counters import with_rates
from landmark.utils.peak_memory import peak_memory_bytes, reset_peak_memory
from landmark.utils.significance import clopper_pearson

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel


def evaluate_recall(
    model: LanguageModel,
    corpus: SyntheticCorpus,
    tokenizer: Tokenizer,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The share of `eval.prompts` prompts of `eval.length` tokens that are answered within `eval.generated` tokens.

    A plain transformer reads the whole prompt at once and keeps all keys; others read `eval.local` tokens at a time.

    Args:
        model: in evaluation mode.
        corpus: makes the prompts, and tells whether a text gives the answer.
        tokenizer: decodes the generated tokens.
        config: the row's settings.
        progress: called with tokens of the prompts read, and in all.

    Returns:
        accuracy, accuracy_low and accuracy_high (Clopper–Pearson, 95 %), prompts, correct [0 or 1 for each], answers
        [[expected, generated]], tokens, keys_attended, landmarks_scored, seconds, tokens_per_second,
        peak_memory_bytes, memory.

    Raises UserError if the length is too short for a prompt.
    """
    settings = config.eval
    local = chunk_length(model.config, settings.length, settings.local, config.memory.window)
    prompts = corpus.prompts(settings.split, settings.length, settings.prompts)
    at_once = settings.batch_size or max(1, TOKENS_AT_ONCE // local)
    correct, answers = [0] * len(prompts), [["", ""]] * len(prompts)
    counters: dict[str, Any] = {}
    done, total = 0, sum(len(prompt.tokens) for prompt in prompts)
    reset_peak_memory()
    started = time.perf_counter()
    by_length = sorted(range(len(prompts)), key=lambda n: len(prompts[n].tokens))
    for _, same in groupby(by_length, key=lambda n: len(prompts[n].tokens)):
        numbers = list(same)
        for start in range(0, len(numbers), at_once):
            batch = numbers[start : start + at_once]
            memory = new_memory(model, config)
            generated = model.generate(
                [prompts[n].tokens for n in batch],
                settings.generated,
                local=local,
                memory=memory,
                progress=None if progress is None else lambda read, _, before=done: progress(before + read, total),
            )
            for n, ids in zip(batch, generated, strict=True):
                text = tokenizer.decode(ids)
                answers[n] = [prompts[n].answer, text]
                correct[n] = int(corpus.data.answered(text, prompts[n].answer))
            add_counters(counters, memory)
            done += sum(len(prompts[n].tokens) for n in batch)
    seconds = time.perf_counter() - started
    low, high = clopper_pearson(sum(correct), len(correct))
    counters = with_rates(counters)
    keys, scored = attention_size(model.config, config, settings.length, local, counters.get("drop_rate", 0.0))
    return {
        "accuracy": sum(correct) / len(correct),
        "accuracy_low": low,
        "accuracy_high": high,
        "prompts": len(correct),
        "correct": correct,
        "answers": answers,
        "tokens": done,
        "keys_attended": keys,
        "landmarks_scored": scored,
        "seconds": seconds,
        "tokens_per_second": done / seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "memory": counters,
    }
