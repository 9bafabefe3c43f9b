"""What a row measures: perplexity (paper, Section 4.1), the loss on repeated text, answers to prompts (Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from landmark.experiment.config.schema import UNIQUE_BLOCKS
from landmark.experiment.data.evaluation_texts import copies, segments, text_size
from landmark.experiment.data.masked import masked_tokens
from landmark.experiment.evaluation.chunks import penultimate_chunk_start
from landmark.experiment.evaluation.measurement import (
    Measurement,
    Progress,
    SegmentLosses,
    inference,
    loss_entries,
    token_losses,
)
from landmark.experiment.evaluation.retrieval import RetrievalMap, RetrievalStatistics
from landmark.memory import Memory
from landmark.models.masked import MaskedDecoder
from landmark.utils.significance import score_interval

if TYPE_CHECKING:
    from landmark.experiment.config import Config
    from landmark.experiment.data import Stream, SyntheticCorpus, Tokenizer
    from landmark.models import LanguageModel

__all__ = ["evaluate", "evaluate_copy", "evaluate_masked", "evaluate_recall"]


def evaluate(
    model: LanguageModel, stream: Stream, tokenizer: Tokenizer, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """Perplexity of one row. Every segment starts with an empty memory, and with the ids that begin a text, if any.

    Returns the entries of `SegmentLosses` and `Measurement`, bits_per_byte, word_perplexity, and with
    `eval.task=unique_blocks` also retrieval (see `RetrievalStatistics.summary`). model: in evaluation mode. Raises
    UserError if the settings do not fit the split or the model.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    counted = SegmentLosses(settings.length)
    retrieval = None
    if settings.task == UNIQUE_BLOCKS:
        start = penultimate_chunk_start(model.config, config, settings.length, measured.local)
        retrieval = RetrievalStatistics(start, measured.local)
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


def evaluate_masked(
    model: LanguageModel, stream: Stream, tokenizer: Tokenizer, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """Masked perplexity of one row. The same tokens are hidden for every model, and at every length.

    The whole text is read at once, layer by layer. A query of a landmark model attends to its own block and to the k
    others, earlier or later, whose landmarks have the highest scores. Returns the entries of `SegmentLosses`, of hidden
    tokens, and of `Measurement`. Raises UserError if the settings do not fit the split or the model.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    masks = masked_tokens(tokenizer)
    assert isinstance(model, MaskedDecoder)
    model.retrieved = config.retrieval.k if model.config.kind == "landmark" else None
    counted = SegmentLosses(settings.length)
    for numbers in measured.batches([segment.length for segment in cut]):
        batch = [cut[number] for number in numbers]
        raw = np.stack([stream.tokens[s.start : s.start + s.length] for s in batch]).astype(np.int64)
        tokens = torch.from_numpy(raw).to(measured.device)
        shown, hidden = masks.mask_text(tokens, [segment.start for segment in batch])
        with inference(model, config):
            logits = model(shown)
            losses = token_losses(logits, tokens)
        for segment, loss, is_hidden in zip(batch, losses.cpu().numpy(), hidden.cpu().numpy(), strict=True):
            places = np.arange(segment.length - segment.counted, segment.length)
            counted.add(segment.start + segment.length - segment.counted, loss, places[is_hidden[places]])
    return counted.entries() | measured.entries(measured.done)


def evaluate_copy(
    model: LanguageModel, stream: Stream, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """The loss on stretches of text that come twice, each counted from its second token on; otherwise as `evaluate`.

    Returns prompts (segments); the entries of `loss_entries` of the second copies and those of `Measurement`;
    first_copy, second_copy (nats a token) and first_segments; where a memory of landmarks retrieves, copy_map (see
    `RetrievalMap.summary`).
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

    second, first = loss_entries(sums(1)), loss_entries(sums(0))
    copy_map = None if observer is None else observer.summary(count)
    return {
        "prompts": count,
        **second,
        # The last token of a segment is predicted and not read.
        **measured.entries(measured.done, settings.length - 1),
        **{"first_copy": first["nll"], "first_segments": first["segments"], "second_copy": second["nll"]},
        **({} if copy_map is None else {"copy_map": copy_map}),
    }


def evaluate_recall(
    model: LanguageModel,
    corpus: SyntheticCorpus,
    tokenizer: Tokenizer,
    config: Config,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The share of `eval.prompts` prompts of `eval.length` tokens that are answered within `eval.generated` tokens.

    Returns accuracy, accuracy_low, accuracy_high (see `score_interval`), prompts, correct [0…1 for each], answers
    [[expected, generated]], tokens, and the entries of `Measurement`. Raises UserError for a length that is too short.
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
    low, high = score_interval([correct])
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


def evidence_blocks(evidence: Sequence[Sequence[tuple[int, int]]], block_size: int) -> Tensor:
    """Blocks that state the answers, (B, n) numbers, padded with −1. evidence: of each prompt, tokens [first, stop)."""
    blocks = [
        sorted({token // block_size for first, stop in ranges for token in range(first, stop)}) for ranges in evidence
    ]
    most = max(1, *map(len, blocks))
    return torch.tensor([each + [-1] * (most - len(each)) for each in blocks])
