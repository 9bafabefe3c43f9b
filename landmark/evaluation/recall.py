"""Accuracy of answers to prompts of synthetic data: pass keys (paper, Figure 3) and RULER's tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from landmark.evaluation.measurement import Measurement, Progress
from landmark.memory import Memory
from landmark.utils.significance import clopper_pearson

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.data import SyntheticCorpus, Tokenizer
    from landmark.models import LanguageModel


def evaluate_recall(
    model: LanguageModel,
    corpus: SyntheticCorpus,
    tokenizer: Tokenizer,
    config: Config,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The share of `eval.prompts` prompts of `eval.length` tokens that are answered within `eval.generated` tokens.

    A plain transformer reads the whole prompt at once and keeps all keys; others read `eval.local` tokens at a time.
    corpus: makes the prompts, and tells whether a text gives the answer. Other arguments as of `evaluate`.

    Returns accuracy, accuracy_low and accuracy_high (see `score_interval`), prompts, correct [0…1 for each], answers
    [[expected, generated]], tokens, keys_attended, landmarks_scored, seconds, tokens_per_second, peak_memory_bytes,
    memory.

    Raises UserError if the length is too short for a prompt.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    assert settings.generated is not None
    prompts = corpus.prompts(settings.split, settings.length, settings.prompts)
    correct: list[float] = [0] * len(prompts)
    answers = [["", ""]] * len(prompts)
    lengths = [len(prompt.tokens) for prompt in prompts]

    def tell(read: int, _: int) -> None:
        if progress is not None:
            progress(measured.done + read, sum(lengths))

    for numbers in measured.batches(lengths):
        memory = measured.new_memory()
        if config.retrieval.scorer == "given" and model.config.block_size is not None:
            kept = memory if isinstance(memory, Memory) else memory.memory  # of a model of transformers
            given: Any = getattr(kept.select, "inner", kept.select)  # within a cutoff
            given.numbers = evidence_blocks([prompts[n].evidence for n in numbers], kept.block_size)
        tokens, reading = [prompts[n].tokens for n in numbers], {"local": measured.local, "memory": memory}
        generated = model.generate(tokens, settings.generated, **reading, progress=tell)
        for n, ids in zip(numbers, generated, strict=True):
            text = tokenizer.decode(ids)
            answers[n] = [prompts[n].answer, text]
            correct[n] = corpus.data.score(text, prompts[n].answer)
    low, high = score_interval(correct)
    return {
        "accuracy": sum(correct) / len(correct),
        "accuracy_low": low,
        "accuracy_high": high,
        "prompts": len(correct),
        "correct": correct,
        "answers": answers,
        "tokens": measured.done,
        **measured.entries(measured.done),
    }


def score_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Bounds of the 95 % interval of a mean of scores 0…1: Clopper–Pearson's, in which a prompt is one trial.

    Where scores are parts of several answers it is wider than it need be.
    """
    total = round(sum(scores), 9)
    return clopper_pearson(math.floor(total), len(scores))[0], clopper_pearson(math.ceil(total), len(scores))[1]


def evidence_blocks(evidence: Sequence[Sequence[tuple[int, int]]], block_size: int) -> Tensor:
    """The blocks that state the answers of a batch of prompts, (B, n) numbers from 0, padded with −1.

    evidence: of each prompt, tokens [first, stop) that state the answer. block_size: ℓ.
    """
    blocks = [
        sorted({token // block_size for first, stop in ranges for token in range(first, stop)}) for ranges in evidence
    ]
    most = max(1, *map(len, blocks))
    return torch.tensor([each + [-1] * (most - len(each)) for each in blocks])
