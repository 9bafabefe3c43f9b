"""Perplexity over segments of a stream, read in chunks with or without memory (paper, Section 4.1)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.config.schema import POSITION_BIN
from landmark.data.bytes_and_words import text_size
from landmark.data.segments import Segment, segments
from landmark.data.stream import Stream
from landmark.data.tokenizer import Tokenizer
from landmark.evaluation.retrieval_statistics import penultimate_chunk
from landmark.memory.counters import RATES, with_rates
from landmark.memory.observer import Observer
from landmark.utils.errors import UserError
from landmark.utils.peak_memory import peak_memory_bytes, reset_peak_memory
from landmark.utils.significance import mean_and_error

if TYPE_CHECKING:
    from landmark.models import LanguageModel

TOKENS_AT_ONCE = 4096  # of all samples' chunks together, where no batch size is given


class EvaluationSettings(Protocol):
    """The parts of the configuration that an evaluation reads."""

    @property
    def eval(self) -> Any: ...
    @property
    def retrieval(self) -> Any: ...
    @property
    def memory(self) -> Any: ...
    @property
    def cmt(self) -> Any: ...
    @property
    def positions(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def seed(self) -> int: ...


def evaluate(
    model: LanguageModel,
    stream: Stream,
    tokenizer: Tokenizer,
    config: EvaluationSettings,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Perplexity of one row.

    Every segment starts with an empty memory and is fed `eval.local` tokens at a time (None: at once; Transformer-XL:
    its window). progress: called with predictions done and in all.

    Returns tokens, nll (nats a token), nll_se, perplexity, perplexity_se, bits_per_byte, word_perplexity, segments
    [[first token counted, tokens, nats]], position_nll [[tokens, nats] for each 64 positions of a segment],
    keys_attended and landmarks_scored (means a query), seconds, tokens_per_second, peak_memory_bytes, memory (sums
    over all segments), and with `eval.retrieval_statistics` also retrieval (see `retrieval_statistics`).

    Raises UserError where the settings do not fit the split or the model.
    """
    settings = config.eval
    local = chunk_length(model, settings.length, settings.local, config.memory.window)
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    batch_size = settings.batch_size or max(1, TOKENS_AT_ONCE // local)
    device = next(model.parameters()).device
    half = device.type == "cuda" and config.train.precision == "bf16-mixed"
    sums, positions = [], np.zeros((-(-settings.length // POSITION_BIN), 2))
    stats: dict[str, Any] = {}
    retrieval = penultimate_chunk(model, settings.length, local) if settings.retrieval_statistics else None
    reset_peak_memory()
    total = sum(segment.counted for segment in cut)
    done, started = 0, time.perf_counter()
    for start in range(0, len(cut), batch_size):
        batch = cut[start : start + batch_size]
        tokens = np.stack([stream.tokens[s.start : s.start + s.length + 1] for s in batch]).astype(np.int64)
        memory = new_memory(model, config, retrieval)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
            losses = segment_losses(model, torch.from_numpy(tokens).to(device), local, memory).cpu().numpy()
        for segment, loss in zip(batch, losses, strict=True):
            skipped = segment.length - segment.counted
            sums.append([segment.targets[0], segment.counted, float(loss[skipped:].sum())])
            bins = np.arange(skipped, segment.length) // POSITION_BIN
            positions[:, 0] += np.bincount(bins, minlength=len(positions))
            positions[:, 1] += np.bincount(bins, loss[skipped:], minlength=len(positions))
        add_stats(stats, memory)
        done += sum(segment.counted for segment in batch)
        if progress is not None:
            progress(done, total)
    seconds = time.perf_counter() - started
    mean, error = mean_and_error(sums)
    size = text_size(stream.tokens, _joined(cut), tokenizer)
    stats = with_rates(stats)
    keys, scored = attention_size(model, config, settings.length, local, stats.get("drop_rate", 0.0))
    results = {
        "tokens": done,
        "nll": mean,
        "nll_se": error,
        "perplexity": math.exp(mean),
        "perplexity_se": math.exp(mean) * error,
        "bits_per_byte": mean * done / size.num_bytes / math.log(2),
        "word_perplexity": math.exp(min(700.0, mean * done / max(1, size.words))),
        "segments": sums,
        "position_nll": positions.tolist(),
        "keys_attended": keys,
        "landmarks_scored": scored,
        "seconds": seconds,
        "tokens_per_second": sum(s.length for s in cut) / seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "memory": stats,
    }
    return results if retrieval is None else results | {"retrieval": retrieval.summary()}


def segment_losses(model: LanguageModel, tokens: Tensor, local: int, memory) -> Tensor:
    """Loss of each prediction (B, L), float64 nats, of segments (B, L+1) fed `local` tokens at a time."""
    losses = []
    for chunk, following in zip(tokens[:, :-1].split(local, 1), tokens[:, 1:].split(local, 1), strict=True):
        logits = model(chunk, memory=memory).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, following.flatten(), reduction="none").view_as(chunk))
    return torch.cat(losses, 1).double()


def add_stats(stats: dict[str, Any], memory: Any) -> None:
    """Add what a memory counted: sums, and the most that was kept; rates are for `with_rates` to make of the sums."""
    for key, value in getattr(memory, "stats", {}).items():
        if key.endswith("_kept"):
            stats[key] = max(stats.get(key, 0), value)
        elif key not in RATES:
            stats[key] = _sum(stats[key], value) if key in stats else value


def _sum(a: Any, b: Any) -> Any:
    """Numbers, or nested lists of them."""
    return [_sum(*pair) for pair in zip(a, b, strict=True)] if isinstance(a, list) else a + b


def chunk_length(model: LanguageModel, length: int, local: int | None, window: int | None = None) -> int:
    """Tokens fed at a time; window: of a plain transformer's memory. Raises UserError where it cannot be fed so."""
    if local is not None and local < 1:
        raise UserError(f"eval.local={local}: a chunk needs at least 1 token")
    if local is not None and local > length:
        raise UserError(f"eval.local={local} is longer than eval.length={length}: chunks are parts of a segment")
    if model.config.kind == "transformer" and local not in (None, length) and window is None:
        raise UserError(
            f"eval.local={local}: a plain transformer keeps no memory between chunks; set memory.window, or "
            f"eval.length={local} to evaluate it on segments of {local}"
        )
    if model.config.kind == "transformer_xl":
        return local or min(length, model.config.window or length)
    return local or length


def attention_size(
    model: LanguageModel, config: EvaluationSettings, length: int, local: int, dropped: float = 0.0
) -> tuple[float, float]:
    """Mean over the queries of a segment: keys of normal tokens attended to, and landmarks scored.

    dropped: the share of lookups that the context miss token drops, whose blocks count as neither.
    """
    keys = scored = 0
    block = model.config.block_size or 0
    for start in range(0, length, local):
        queries = min(local, length - start)
        own = queries * (queries + 1) // 2
        if model.config.kind == "transformer_xl":
            own += queries * min(start, model.config.cache or 0)
        elif model.config.kind == "transformer" and config.memory.window is not None:
            own += queries * min(start, config.memory.sinks + config.memory.window)
        elif model.config.kind == "landmark":
            fed, pending = divmod(start, block)
            kept = fed if config.memory.blocks is None else min(fed, config.memory.blocks)
            own += queries * (pending + (1 - dropped) * min(config.retrieval.k, kept) * block)
            scored += queries * (1 - dropped) * (kept if config.retrieval.scorer in ("landmark", "mean_key") else 0)
            scored += sum((pending + query) // block for query in range(queries))
        keys += own
    return keys / length, scored / length


def new_memory(model: LanguageModel, config: EvaluationSettings, observer: Observer | None = None):
    """An empty memory as the settings want it; None for a plain transformer without a window."""
    if model.config.kind == "transformer" and config.memory.window is not None:
        return model.new_memory(window=config.memory.window, sinks=config.memory.sinks)
    if model.config.kind != "landmark":
        return model.new_memory()
    return model.new_memory(**memory_settings(config), observer=observer)


def memory_settings(config: EvaluationSettings) -> dict[str, Any]:
    """Those of `landmark.memory.Memory`, for a landmark model."""
    return {
        "max_blocks": config.memory.blocks,
        "k": config.retrieval.k,
        "granularity": config.retrieval.granularity,
        "scorer": config.retrieval.scorer,
        "tier": config.memory.tier,
        "folder": config.memory.folder,
        "cache": config.memory.cache,
        "index": config.memory.index,
        "index_type": config.memory.index_type,
        "candidates": config.memory.candidates,
        "cutoff": config.cmt.cutoffs or config.cmt.cutoff,
        "mapping": config.positions.mapping,
        "seed": config.seed,
    }


def _joined(cut: list[Segment]) -> list[tuple[int, int]]:
    """The ranges of the tokens that are predicted, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for first, stop in sorted(segment.targets for segment in cut):
        if ranges and ranges[-1][1] == first:
            ranges[-1] = ranges[-1][0], stop
        else:
            ranges.append((first, stop))
    return ranges
