"""Training windows of synthetic data, alone or among windows of text.

A window is the beginning of one text, with landmarks L inserted (here ℓ = 4), and padded with end of text E::

    raw       i s _ 4 2 . _ I s _ i t _ 4 2 ?  E …
    tokens    i s _ 4 L 2 . _ I L s _ i t L _ 4 2 ? L E …
    weights   1 1 0 0 - 1 1 1 1 - 1 1 1 1 - w w 1 - - - …

Where the tokenizer has ids that begin a text, they come first, without weights. A weight belongs to the token that
follows: w if that token can be read off the text before it, 0 if it cannot be known.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from landmark.experiment.data.random_numbers import TASKS, fractions, random_numbers, sample_generator
from landmark.experiment.data.synthetic import SyntheticCorpus
from landmark.experiment.data.windows import TrainingWindows, raw_position
from landmark.utils.constants import NO_LOSS
from landmark.utils.window_batch import WindowBatch


class SyntheticWindows:
    """Batches of samples, as a pure function of (seed, step, index)."""

    def __init__(
        self, corpus: SyntheticCorpus, split: str, *, length: int, batch_size: int, seed: int, block_size: int | None
    ):
        """split: each has its own samples. The others as for `TrainingWindows`."""
        self._data, self._tokenizer, self._split = corpus.data, corpus.tokenizer, split
        self.length, self.batch_size, self.seed, self.block_size = length, batch_size, seed, block_size
        self._raw = length if block_size is None else length - length // (block_size + 1)
        self._beginning = np.array(corpus.tokenizer.beginning, dtype=np.int64)

    def batch(self, step: int, indices: Sequence[int] | None = None) -> WindowBatch:
        """Samples `indices` (None: all) of the batch of a step."""
        chosen = range(self.batch_size) if indices is None else indices
        return self._make([sample_generator(self._split, self.seed, step, index) for index in chosen])

    def evenly_spaced(self, count: int) -> np.ndarray:
        """Numbers of the samples for validation, (count,) int64."""
        return np.arange(count)

    def at(self, numbers: Sequence[int] | np.ndarray) -> WindowBatch:
        """The samples with these numbers."""
        return self._make([sample_generator(self._split, int(number)) for number in numbers])

    def _make(self, rngs: list[np.random.Generator]) -> WindowBatch:
        tokens, targets, weights = (np.stack(arrays) for arrays in zip(*map(self._sample, rngs), strict=True))
        phase = None if self.block_size is None else torch.zeros(len(tokens), dtype=torch.int64)
        return WindowBatch(torch.from_numpy(tokens), torch.from_numpy(targets), phase, torch.from_numpy(weights))

    def _sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and weights (T,) of a window; the mean weight of targets is one."""
        begun = len(self._beginning)
        window = self._data.window(rng, self._raw - begun, self._tokenizer)
        tokens = np.concatenate([self._beginning, window.tokens])
        targets, weights = (np.pad(x, (begun, 0)) for x in (window.targets, window.weights))
        if self.block_size is not None:
            raw, is_landmark = raw_position(np.arange(self.length), self.block_size)
            raw = np.minimum(raw, self._raw - 1)  # after a landmark at the end there is nothing
            tokens = np.where(is_landmark, self._tokenizer.landmark, tokens[raw])
            targets, weights = targets[raw], np.where(is_landmark, 0.0, weights[raw])
        targets = np.where(weights > 0, targets, NO_LOSS)
        weights = weights * (weights > 0).sum() / max(weights.sum(), 1e-9)
        return tokens.astype(np.int64), targets.astype(np.int64), weights.astype(np.float32)


class MixedWindows:
    """Windows of text, of which a share are tasks instead, as a pure function of (seed, step, index)."""

    def __init__(self, text: TrainingWindows, tasks: SyntheticWindows, share: float):
        """tasks: of the same length, batch size, seed and block size. share: of the windows that are tasks, 0…1."""
        self._text, self._tasks, self.share = text, tasks, share
        self.batch_size = text.batch_size

    def batch(self, step: int, indices: range | None = None) -> WindowBatch:
        """Windows `indices` (None: all) of the batch of a step; the first step is 0."""
        indices = range(self.batch_size) if indices is None else indices
        batch = self._text.batch(step, indices)
        drawn = random_numbers(self._text.seed, step, TASKS, indices)
        rows = np.flatnonzero(fractions(drawn) < self.share)
        if len(rows) == 0:
            return batch
        tasks = self._tasks.batch(step, [indices[row] for row in rows])
        made = replace(batch, weights=torch.ones(batch.tokens.shape))
        for name in ("tokens", "targets", "phase", "weights"):
            if (values := getattr(tasks, name)) is not None:
                getattr(made, name)[rows] = values
        return made
