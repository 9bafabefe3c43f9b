"""How the texts of a row are read, and what that costs: the loop over batches that all evaluations share."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.experiment.config.schema import POSITION_BIN, memory_settings
from landmark.experiment.evaluation.chunks import attention_size, chunk_length, kept_tokens
from landmark.memory.retrievals import RATES, Observer, with_rates
from landmark.models.head_loss import IN_CACHE
from landmark.utils.hardware import peak_memory_bytes, reset_peak_memory

if TYPE_CHECKING:
    from landmark.experiment.config import Config
    from landmark.models import LanguageModel

# Most tokens of the chunks of a batch, and logits of these, without a setting of its size. A GPU waits for launches.
CPU_AT_ONCE, GPU_AT_ONCE = (1 << 12, 1 << 28), (1 << 15, 1 << 30)
Progress = Callable[[int, int], None]


class Measurement:
    """How a row's texts are read, and what that costs. local: tokens read at a time. batch_size: texts read together.
    done: tokens of the batches before.
    """

    def __init__(self, model: LanguageModel, config: Config, progress: Progress | None = None):
        """progress: called with tokens read, and in all. Raises UserError if the settings do not fit the model."""
        settings = config.eval
        self.local = chunk_length(model.config, settings.length, settings.local, kept_tokens(config))
        self.device = next(model.parameters()).device
        tokens, logits = CPU_AT_ONCE if self.device.type == "cpu" else GPU_AT_ONCE
        self.batch_size = settings.batch_size or max(1, min(tokens, logits // model.config.vocab_size) // self.local)
        self.done = 0
        self._model, self._config, self._progress = model, config, progress
        self._counters: dict[str, Any] = {}
        self._memory: Any = None
        self._seconds = 0.0

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The numbers of the texts of each batch. lengths: tokens of each text that are read."""
        reset_peak_memory()
        started = time.perf_counter()
        for numbers in alike(lengths, self.batch_size):
            yield numbers
            add_counters(self._counters, self._memory)
            self._memory = None
            self.done += sum(lengths[number] for number in numbers)
            if self._progress is not None:
                self._progress(self.done, sum(lengths))
        self._seconds = time.perf_counter() - started

    def new_memory(self, observer: Observer | None = None) -> Any:
        """An empty memory for the batch; None for a plain transformer of ours without a window."""
        self._memory = new_memory(self._model, self._config, observer)
        return self._memory

    def losses(self, tokens: np.ndarray, memory: Any) -> np.ndarray:
        """`segment_losses` of raw ids (B, L+1)."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        with inference(self._model, self._config):
            return segment_losses(self._model, ids, self.local, memory).cpu().numpy()

    def entries(self, tokens: int, length: int | None = None) -> dict[str, Any]:
        """What every record has: keys_attended, landmarks_scored (means over queries), seconds, tokens_per_second,
        peak_memory_bytes, memory (counters). tokens: read in that time. length: of a text (None: `eval.length`).
        """
        counters = with_rates(self._counters)
        length = self._config.eval.length if length is None else length
        drop_rate = counters.get("drop_rate", 0.0)
        keys, scored = attention_size(self._model.config, self._config, length, self.local, drop_rate)
        return {
            "keys_attended": keys,
            "landmarks_scored": scored,
            "seconds": self._seconds,
            "tokens_per_second": tokens / self._seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "memory": counters,
        }


def alike(kinds: Sequence[Any], most: int) -> Iterator[list[int]]:
    """The numbers of texts of the same kind, as of a length, at most `most` together, the longest first."""
    for kind in sorted(set(kinds), reverse=True):
        same = [number for number, each in enumerate(kinds) if each == kind]
        for start in range(0, len(same), most):
            yield same[start : start + most]


def segment_losses(model: LanguageModel, tokens: Tensor, local: int, memory: Any) -> Tensor:
    """Losses (B, L) of predictions of raw ids (B, L+1). memory: empty, for the batch; None: nothing is kept."""
    losses = []
    for read, logits in model.read_text(tokens[:, :-1], memory, kept=tokens.shape[1] - 1, most=local):
        assert logits is not None
        losses.append(token_losses(logits, tokens[:, 1 + read - logits.shape[1] : 1 + read]))
    return torch.cat(losses, 1)


def token_losses(logits: Tensor, following: Tensor) -> Tensor:
    """The loss of each prediction, float64 nats, of logits in float32 or better; a CPU's cache holds few at a time."""
    dtype, few = torch.promote_types(logits.dtype, torch.float32), following.numel()
    if not logits.is_cuda:
        few = max(1, IN_CACHE // logits.shape[-1])
    parts = zip(logits.flatten(0, 1).split(few), following.flatten().split(few), strict=True)
    losses = [F.cross_entropy(part.to(dtype), targets, reduction="none") for part, targets in parts]
    return torch.cat(losses).view_as(following).double()


@contextlib.contextmanager
def inference(model: LanguageModel, config: Config) -> Iterator[None]:
    """Without gradients; on a GPU in the precision of the training."""
    half = next(model.parameters()).device.type == "cuda" and config.train.precision == "bf16-mixed"
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
        yield


def new_memory(model: LanguageModel, config: Config, observer: Observer | None = None) -> Any:
    """An empty memory; None for a plain transformer of ours without a window."""
    if model.config.kind == "transformer" and config.model.name is not None:
        return model.unlimited_memory(config.eval.length)
    if model.config.kind == "transformer" and config.memory.window is not None:
        return model.new_memory(window=config.memory.window, sinks=config.memory.sinks)
    if model.config.kind != "landmark":
        return model.new_memory()
    return model.new_memory(**vars(memory_settings(config)), observer=observer)


def add_counters(total: dict[str, Any], memory: Any) -> None:
    """Add a memory's counters to `total`; of keys that end in _kept the maximum. `with_rates` computes the rates."""
    for key, value in getattr(memory, "stats", {}).items():
        if key.endswith("_kept"):
            total[key] = max(total.get(key, 0), value)
        elif key not in RATES:
            total[key] = np.add(total.get(key, 0), value).tolist()  # some are nested lists


class SegmentLosses:
    """Sums of losses, segment by segment and position by position. length: L, tokens of a segment."""

    def __init__(self, length: int):
        self._segments: list[list[float]] = []
        self._positions = np.zeros((-(-length // POSITION_BIN), 2))

    def add(self, first: int, losses: np.ndarray, counted: np.ndarray) -> None:
        """first: place in the stream of the first token counted. losses: (L,), nats. counted: positions that count."""
        self._segments.append([first, len(counted), float(losses[counted].sum())])
        bins, size = counted // POSITION_BIN, len(self._positions)
        self._positions[:, 0] += np.bincount(bins, minlength=size)
        self._positions[:, 1] += np.bincount(bins, losses[counted], minlength=size)

    def entries(self) -> dict[str, Any]:
        """Those of `loss_entries`, and position_nll: [[tokens, nats] for each POSITION_BIN positions of a segment]."""
        return loss_entries(self._segments) | {"position_nll": self._positions.tolist()}


def loss_entries(segments: Sequence[Sequence[float]]) -> dict[str, Any]:
    """tokens, nll (nats a token), perplexity, segments [[first token counted, tokens, nats]]."""
    tokens, nll = sum(int(tokens) for _, tokens, _ in segments), math.fsum(nats for *_, nats in segments)
    nll /= tokens
    return {"tokens": tokens, "nll": nll, "perplexity": math.exp(nll), "segments": segments}
