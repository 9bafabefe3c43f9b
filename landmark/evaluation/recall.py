"""Accuracy of answers to prompts that a task makes: the pass key of Figure 3, definitions and queries."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from landmark.data.synthetic_corpus import SyntheticCorpus
from landmark.data.tokenizer import Tokenizer
from landmark.evaluation.perplexity import (
    TOKENS_AT_ONCE,
    EvaluationSettings,
    add_stats,
    attention_size,
    chunk_length,
    new_memory,
)
from landmark.memory.counters import with_rates
from landmark.utils.peak_memory import peak_memory_bytes, reset_peak_memory
from landmark.utils.significance import clopper_pearson

if TYPE_CHECKING:
    from landmark.models import LanguageModel


def evaluate_recall(
    model: LanguageModel,
    corpus: SyntheticCorpus,
    tokenizer: Tokenizer,
    config: EvaluationSettings,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """How many of `eval.prompts` prompts of `eval.length` tokens are answered, in `eval.generated` tokens.

    A plain transformer reads the whole prompt at once and keeps all its keys; others read `eval.local` at a time.

    Returns accuracy, accuracy_low and accuracy_high (Clopper–Pearson, 95 %), prompts, correct [0 or 1 each], answers
    [[expected, generated]], tokens, keys_attended, landmarks_scored, seconds, tokens_per_second, peak_memory_bytes,
    memory. Raises UserError where the length is too short for a prompt.
    """
    settings = config.eval
    local = chunk_length(model, settings.length, settings.local, config.memory.window)
    prompts = corpus.prompts(settings.split, settings.length, settings.prompts)
    at_once = settings.batch_size or max(1, TOKENS_AT_ONCE // local)
    correct, answers = [0] * len(prompts), [["", ""]] * len(prompts)
    stats: dict[str, Any] = {}
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
            add_stats(stats, memory)
            done += sum(len(prompts[n].tokens) for n in batch)
    seconds = time.perf_counter() - started
    low, high = clopper_pearson(sum(correct), len(correct))
    stats = with_rates(stats)
    keys, scored = attention_size(model, config, settings.length, local, stats.get("drop_rate", 0.0))
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
        "memory": stats,
    }
