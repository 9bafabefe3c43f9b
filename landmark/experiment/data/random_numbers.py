"""Random numbers as functions of seed, step and index, so that each window of a batch can be made separately."""

import math
from typing import Any

import numpy as np

from landmark.experiment.data.sources import SPLITS

# Independent streams of random numbers for the same seed and step.
STARTS, CONTROLLED, JUMPS, REPEATS, _, TASKS, MASKS = range(7)


def random_numbers(seed: int, step: int, stream: int, indices: range, shape: tuple[int, ...] = ()) -> np.ndarray:
    """uint64 random numbers (indices, *shape) of windows of a step, each by itself, by Philox. stream: see above."""
    philox = np.random.Philox(key=np.array([seed, step], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64))
    return philox.random_raw(indices.stop * math.prod(shape)).reshape(-1, *shape)[indices.start :: indices.step]


def fractions(drawn: np.ndarray | np.uint64) -> Any:
    """Random numbers as fractions in [0, 1)."""
    return (drawn >> np.uint64(11)) * 2.0**-53


def sample_generator(split: str, *numbers: int) -> np.random.Generator:
    """The random numbers of the synthetic sample or prompt with these numbers, different for each split."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([SPLITS.index(split), *numbers])))
