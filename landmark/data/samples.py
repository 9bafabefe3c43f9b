"""Training windows of a task that makes its samples.

A window is one text from its beginning, landmarks inserted (ℓ = 4, L), padded with end of text (E)::

    raw       i s _ 4 2 . _ I s _ i t _ 4 2 ?  E …
    tokens    i s _ 4 L 2 . _ I L s _ i t L _ 4 2 ? L E …
    weights   1 1 0 0 - 1 1 1 1 - 1 1 1 1 - w w 1 - - - …    of the token after each: w where the text before tells it
"""

from collections.abc import Sequence

import numpy as np
import torch

from landmark.data.synthetic import Task, encode, random
from landmark.data.tokenizers import Tokenizer
from landmark.data.windows import NO_LOSS, Batch, raw_position


class SampleWindows:
    """Batches of samples, a pure function of (seed, step, index)."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        split: str,
        *,
        length: int,
        batch_size: int,
        seed: int,
        block_size: int | None,
    ):
        """`length`: T, landmarks included."""
        self._task, self._tokenizer, self._split = task, tokenizer, split
        self.length, self.batch_size, self.seed, self.block_size = length, batch_size, seed, block_size
        self._raw = length if block_size is None else length - length // (block_size + 1)

    def batch(self, step: int, indices: range | None = None) -> Batch:
        """Samples `indices` (all, by default) of the batch of a step."""
        chosen = range(self.batch_size) if indices is None else indices
        return self._make([random(self._split, self.seed, step, index) for index in chosen])

    def starts(self, step: int) -> np.ndarray:
        """(batch_size,) int64: numbers of a step's samples, of which each with seed and step gives its sample."""
        return np.arange(self.batch_size)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """(count,) int64: numbers of the samples to validate on."""
        return np.arange(count)

    def at(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The samples with these numbers."""
        return self._make([random(self._split, int(number)) for number in numbers])

    def _make(self, rngs: list[np.random.Generator]) -> Batch:
        tokens, targets, weights = (np.stack(arrays) for arrays in zip(*map(self._sample, rngs), strict=True))
        phase = None if self.block_size is None else torch.zeros(len(tokens), dtype=torch.int64)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), phase, torch.from_numpy(weights))

    def _sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and weights (T,) of a window; weights have mean one over the targets."""
        ids, weight = encode(self._task.sample(rng, self._raw), self._tokenizer)
        eot = self._tokenizer.eot
        padding = max(0, self._raw + 2 - len(ids))
        ids = np.concatenate([ids, np.full(padding, eot)])
        weight = np.concatenate([weight, np.zeros(padding)])
        if self.block_size is None:
            tokens, targets, weights = ids[: self.length], ids[1 : self.length + 1], weight[1 : self.length + 1]
        else:
            raw, is_landmark = raw_position(np.arange(self.length), self.block_size)
            tokens = np.where(is_landmark, self._tokenizer.landmark, ids[raw])
            targets, weights = ids[raw + ~is_landmark], np.where(is_landmark, 0.0, weight[raw + ~is_landmark])
        counted = (weights > 0) & (tokens != eot)
        targets = np.where(counted, targets, NO_LOSS)
        weights = np.where(counted, weights, 0.0)
        weights = weights * counted.sum() / max(weights.sum(), 1e-9)
        return tokens.astype(np.int64), targets.astype(np.int64), weights.astype(np.float32)
