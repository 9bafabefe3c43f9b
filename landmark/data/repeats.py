"""Repeats: in a share of the training windows, some stretches of the text are copies of earlier stretches.

So copying pays, and a small model learns to look back. Repeats are made in the raw tokens, before landmarks are
inserted, so a copy may stand at another place of its block than its source. Two stretches, here of 3 and 2 tokens, and
then landmarks L with ℓ = 4::

    raw tokens      a b c d e f g h i j k l m
    origins         0 1 2 3 4 5 1 2 3 9 2 3 12
    with repeats    a b c d e f b c d j c d m
    tokens          a b c d L e f b c L d j c d L m
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from landmark.data.random_numbers import REPEATS, random_numbers
from landmark.utils.constants import SHORTEST_REPEAT

_MOST = 3  # repeated stretches of a window


@dataclass(frozen=True)
class Repeats:
    """The repeated stretches of training windows.

    A window with repeats has one to three of them. The length of each is log-uniform, from 8 tokens to half of the
    window's raw tokens. Source and target are drawn uniformly from all pairs of places that do not overlap. Targets are
    overwritten from left to right, so every copy is in the final text.

    shares: of windows with repeats, at evenly spaced moments of the training, linear between. steps: of the training.
    """

    shares: Sequence[float]
    steps: int

    def share(self, step: int) -> float:
        """Share of windows with repeats in an optimizer step, from 0."""
        return float(np.interp(step, np.linspace(0, max(self.steps - 1, 1), len(self.shares)), self.shares))

    def origins(self, sizes: np.ndarray, seed: int, step: int, indices: range) -> np.ndarray:
        """For each raw token of windows `indices` of a step the raw token that it is a copy of, or itself.

        sizes: (indices,) raw tokens of each window, those that are only predicted included. A window of fewer than 16
        has no repeats. Returns (indices, largest size) int64, counted from the first raw token of each window.
        """
        drawn = random_numbers(seed, step, REPEATS, indices, (2 + 3 * _MOST,))
        origins = np.tile(np.arange(sizes.max(initial=0)), (len(sizes), 1))
        for window, (chosen, *numbers) in enumerate(drawn.tolist()):
            if _fraction(chosen) < self.share(step) and sizes[window] >= 2 * SHORTEST_REPEAT:
                for source, target, length in _stretches(int(sizes[window]), numbers):
                    origins[window, target : target + length] = origins[window, source : source + length]
        return origins


def _stretches(size: int, numbers: list[int]) -> list[tuple[int, int, int]]:
    """Source, target and length of the stretches of a window, by target. numbers: random, 64 bits each."""
    stretches, (count, *rest) = [], numbers
    for stretch in range(1 + count % _MOST):
        number, *places = rest[3 * stretch : 3 * stretch + 3]
        length = _log_uniform(SHORTEST_REPEAT, size // 2, number)
        source, target = sorted(place % (size - 2 * length + 1) for place in places)
        stretches.append((source, target + length, length))
    return sorted(stretches, key=lambda found: found[1])


def _log_uniform(least: int, most: int, number: int) -> int:
    """A number in least…most, each with a probability in proportion to log((n + 1) / n)."""
    return min(int(least * ((most + 1) / least) ** _fraction(number)), most)


def _fraction(number: int) -> float:
    """The random number as a fraction in [0, 1)."""
    return (number >> 11) * 2.0**-53
