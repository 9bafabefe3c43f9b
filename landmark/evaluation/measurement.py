"""What every evaluation with a memory measures beside its own results: keys attended, time, peak memory, counters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from landmark.evaluation.chunks import attention_size, chunk_length, kept_tokens
from landmark.evaluation.memories import add_counters
from landmark.memory.counters import with_rates
from landmark.utils.hardware import peak_memory_bytes, reset_peak_memory

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.models import LanguageModel

TOKENS_AT_ONCE = 4096  # tokens of the chunks of a batch, without a setting of the batch size


class Measurement:
    """How a row's texts are read, and what that costs.

    1. `start`, when the texts are ready.
    2. `add` each memory, when its batch is read.
    3. `stop` after the last batch.
    4. `entries`: the part of the record that all evaluations have.

    local: tokens that are read at a time. batch_size: texts that are read together. device: of the model.
    """

    def __init__(self, model: LanguageModel, config: Config):
        """Raises UserError if the settings do not fit the model."""
        settings = config.eval
        self.local = chunk_length(model.config, settings.length, settings.local, kept_tokens(config))
        self.batch_size = settings.batch_size or max(1, TOKENS_AT_ONCE // self.local)
        self.device = next(model.parameters()).device
        self._shape, self._config = model.config, config
        self._counters: dict[str, Any] = {}
        self._started = self._seconds = 0.0

    def start(self) -> None:
        """Begin to measure time and peak memory."""
        reset_peak_memory()
        self._started = time.perf_counter()

    def add(self, memory: Any) -> None:
        """Add a memory's counters; None has none."""
        add_counters(self._counters, memory)

    def stop(self) -> None:
        """End the time."""
        self._seconds = time.perf_counter() - self._started

    def entries(
        self, tokens: int, length: int | None = None, attended: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """keys_attended, landmarks_scored (means over queries), seconds, tokens_per_second, peak_memory_bytes, memory.

        Args:
            tokens: read in the time measured.
            length: tokens of a text that are read (None: `eval.length`).
            attended: the first two entries (None: of a causal model with its memory).
        """
        counters = with_rates(self._counters)
        length = self._config.eval.length if length is None else length
        drop_rate = counters.get("drop_rate", 0.0)
        keys, scored = attended or attention_size(self._shape, self._config, length, self.local, drop_rate)
        return {
            "keys_attended": keys,
            "landmarks_scored": scored,
            "seconds": self._seconds,
            "tokens_per_second": tokens / self._seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "memory": counters,
        }
