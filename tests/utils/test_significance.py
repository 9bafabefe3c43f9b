"""Errors of means, and paired differences across segment lengths."""

import math

import numpy as np
import pytest

from landmark.utils.significance import mean_and_error, paired_difference


def cut(losses, length):
    """Segments of a stream whose prediction of token i + 1 costs losses[i]."""
    return [[i + 1, length, float(losses[i : i + length].sum())] for i in range(0, len(losses) - length + 1, length)]


def test_mean_and_error_of_independent_segments_which_weigh_by_their_tokens():
    losses = np.random.default_rng(0).normal(2.0, 1.0, 40_000)
    mean, error = mean_and_error(cut(losses, 100))
    assert mean == pytest.approx(losses.mean())
    assert error == pytest.approx(1 / math.sqrt(40_000), rel=0.1)
    mean, error = mean_and_error([[0, 1, 10.0], [1, 3, 3.0]])
    assert mean == pytest.approx(13 / 4)
    assert error == pytest.approx(math.sqrt(2 * (6.75**2 + 6.75**2)) / 4)
    assert math.isnan(mean_and_error([[0, 1, 10.0]])[1])


def test_pairing_removes_what_both_share():
    generator = np.random.default_rng(1)
    shared = generator.normal(3.0, 1.0, 72_000)
    better = shared - 0.01 + generator.normal(0, 0.02, 72_000)
    difference = paired_difference(cut(better, 360), cut(shared, 240))
    assert difference is not None
    assert difference.stretches == 100  # every 720 tokens both end a segment
    assert difference.nats == pytest.approx((better - shared).mean())
    assert difference.error < 0.001
    assert difference.nats < -2 * difference.error
    opposite = paired_difference(cut(shared, 360), cut(better, 240))
    assert opposite is not None
    assert opposite.nats > 2 * opposite.error


def test_spans_apart_and_segments_moved_back_are_compared_and_different_text_not():
    a = [[1, 10, 5.0], [101, 10, 6.0], [201, 10, 7.0]]
    b = [[1, 7, 3.0], [8, 3, 1.0], [101, 7, 3.0], [108, 3, 2.0], [201, 7, 4.0], [208, 3, 2.0]]
    difference = paired_difference(a, b)
    assert difference is not None
    assert difference.stretches == 3
    assert difference.nats == pytest.approx((18 - 15) / 30)
    assert difference.error == pytest.approx(0.0, abs=1e-12)
    assert paired_difference([[1, 10, 5.0], [11, 10, 5.0]], [[2, 10, 5.0], [12, 10, 5.0]]) is None
    assert paired_difference([[1, 10, 5.0]], [[1, 5, 2.0], [6, 5, 2.0]]) is None
