"""Training windows of text, a share of which are replaced by tasks."""

from dataclasses import replace

import numpy as np
import torch

from landmark.data.random_numbers import TASKS, random_numbers
from landmark.data.synthetic_windows import SyntheticWindows
from landmark.data.windows import TrainingWindows
from landmark.utils.window_batch import WindowBatch


class MixedWindows:
    """Batches of windows, as a pure function of (seed, step, index); windows of text are those without tasks."""

    def __init__(self, text: TrainingWindows, tasks: SyntheticWindows, share: float):
        """
        Args:
            text: windows of text.
            tasks: windows of tasks, with the same length, batch size, seed and block size.
            share: of the windows that are tasks, 0…1.
        """
        self._text, self._tasks, self.share = text, tasks, share
        self.batch_size = text.batch_size

    def batch(self, step: int, indices: range | None = None) -> WindowBatch:
        """Windows `indices` (None: all) of the batch of a step; the first step is 0."""
        indices = range(self.batch_size) if indices is None else indices
        batch = self._text.batch(step, indices)
        rows = np.flatnonzero(self._are_tasks(step, indices))
        if len(rows) == 0:
            return batch
        tasks = self._tasks.batch(step, [indices[row] for row in rows])
        made = replace(batch, weights=torch.ones(batch.tokens.shape))
        for name in ("tokens", "targets", "phase", "weights"):
            if (values := getattr(tasks, name)) is not None:
                getattr(made, name)[rows] = values
        return made

    def starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin, as in `TrainingWindows`; −1 for a task, which has no place in the text."""
        return np.where(self._are_tasks(step, range(self.batch_size)), -1, self._text.starts(step))

    def _are_tasks(self, step: int, indices: range) -> np.ndarray:
        """Which windows of a step are tasks, bool."""
        drawn = random_numbers(self._text.seed, step, TASKS, indices)
        return (drawn >> np.uint64(11)) * 2.0**-53 < self.share
