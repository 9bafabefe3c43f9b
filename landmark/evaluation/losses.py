"""Losses of a row's segments, and the entries of its record that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from landmark.config.schema import POSITION_BIN
from landmark.utils.significance import mean_and_error


class SegmentLosses:
    """Sums of losses, segment by segment and position by position.

    length: L, tokens of a segment.
    """

    def __init__(self, length: int):
        self._segments: list[list[float]] = []
        self._positions = np.zeros((-(-length // POSITION_BIN), 2))

    def add(self, first: int, losses: np.ndarray, counted: np.ndarray) -> None:
        """Add a segment.

        Args:
            first: place in the stream of the first token counted.
            losses: (L,), nats.
            counted: positions in the segment of the losses that count.
        """
        self._segments.append([first, len(counted), float(losses[counted].sum())])
        bins, size = counted // POSITION_BIN, len(self._positions)
        self._positions[:, 0] += np.bincount(bins, minlength=size)
        self._positions[:, 1] += np.bincount(bins, losses[counted], minlength=size)

    def entries(self) -> dict[str, Any]:
        """Those of `loss_entries`, and position_nll: [[tokens, nats] for each POSITION_BIN positions of a segment]."""
        return loss_entries(self._segments) | {"position_nll": self._positions.tolist()}


def loss_entries(segments: Sequence[Sequence[float]]) -> dict[str, Any]:
    """tokens, nll (nats a token), nll_se, perplexity, perplexity_se, segments.

    segments: [[first token counted, tokens, nats]].
    """
    mean, error = mean_and_error(segments)
    return {
        "tokens": sum(int(tokens) for _, tokens, _ in segments),
        "nll": mean,
        "nll_se": error,
        "perplexity": math.exp(mean),
        "perplexity_se": math.exp(mean) * error,
        "segments": segments,
    }
