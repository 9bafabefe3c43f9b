"""Errors of mean losses over the text and over seeds, and paired differences across segment lengths."""

import math

import numpy as np
import pytest

from landmark.utils.significance import Text, clopper_pearson, mean_loss, paired_difference, score_interval, student


def cut(losses, length, first=0):
    """Segments of a stream whose prediction of token i + 1 costs losses[i - first]."""
    starts = range(0, len(losses) - length + 1, length)
    return [[first + i + 1, length, float(losses[i : i + length].sum())] for i in starts]


def spans_of(losses, length, apart=10_000):
    """The same of spans (N, T) that begin so many tokens apart; the last segment of each has the rest."""
    found = []
    for number, span in enumerate(losses):
        found += cut(span, length, number * apart)
        if rest := len(span) % length:
            found.append([number * apart + len(span) - rest + 1, rest, float(span[-rest:].sum())])
    return found


def test_an_error_is_over_spans_of_the_text_whatever_the_length_of_segments():
    """Losses of a span share much: over its parts, as if they were independent, the error would be far too small."""
    draw = np.random.default_rng(0)
    losses = draw.normal(3.0, 1.0, (20, 4096)) + draw.normal(0, 0.5, (20, 1))
    by_hand = losses.mean(1).std(ddof=1) / math.sqrt(20)
    for length in (4096, 512, 360, 250):
        found = mean_loss([spans_of(losses, length)])
        assert found.nats == pytest.approx(losses.mean())
        assert (found.seeds, found.error) == (None, pytest.approx(by_hand))
        assert found.text.over == "20 spans of 4,096 tokens"
    few = mean_loss([spans_of(losses[:7], 512)])
    assert (few.error, few.chance, few.text.over) == (None, None, "7 spans of 4,096 tokens")


def test_units_are_documents_where_those_are_larger_and_enough():
    losses = np.random.default_rng(1).normal(3.0, 1.0, 40 * 4096)
    segments = cut(losses, 512)
    starts = [0, *range(6000, 40 * 4096, 10_000)]  # 17 documents, where there are 40 spans
    found = mean_loss([segments], Text(documents=starts))
    sums = {}
    for first, tokens, nats in segments:
        span = (first - 1) // 4096 * 4096 + 1
        number = sum(start <= span for start in starts)
        old = sums.get(number, (0, 0.0))
        sums[number] = old[0] + tokens, old[1] + nats
    mean = sum(nats for _, nats in sums.values()) / sum(tokens for tokens, _ in sums.values())
    squares = sum((nats - mean * tokens) ** 2 for tokens, nats in sums.values())
    assert found.text.over == "17 documents"
    assert found.error == pytest.approx(math.sqrt(17 / 16 * squares) / (40 * 4096))
    for documents in (range(0, 40 * 4096, 2048), starts[:6], None):  # smaller ones, too few, not known
        assert mean_loss([segments], Text(documents=documents)).text.over == "40 spans of 4,096 tokens"
    assert mean_loss([segments[:32]], Text(documents=[0, 900, 9000])).text.over == "4 spans of 4,096 tokens"


def test_seeds_have_an_error_of_their_own_beside_that_of_the_text():
    draw = np.random.default_rng(2)
    shared, harder = draw.normal(3.0, 1.0, (1, 16, 4096)), draw.normal(0, 0.1, (1, 16, 1))
    seeds = shared + draw.normal(0, 0.05, (3, 1, 1))
    others = shared + 0.02 + harder + draw.normal(0, 0.05, (3, 1, 1))
    row, other = ([spans_of(seed, 512) for seed in each] for each in (seeds, others))
    found = paired_difference(row, other)
    by_seed = (seeds - others).mean((1, 2))
    assert found.nats == pytest.approx(by_seed.mean())
    assert (found.error, found.seeds.over) == (pytest.approx(by_seed.std(ddof=1) / math.sqrt(3)), "3 seeds")
    by_span = (seeds - others).mean((0, 2))
    assert found.text.value == pytest.approx(by_span.std(ddof=1) / 4)
    assert found.chance == max(each.chance(found.nats) for each in (found.seeds, found.text))
    again = paired_difference(row, other[:1])  # where the seed decides nothing, one is compared with all
    assert again.nats == pytest.approx((seeds - others[:1]).mean())
    with pytest.raises(ValueError, match="zip"):
        paired_difference(row, other[:2])


def test_students_t_and_the_interval_of_seeds():
    """Values of a printed table."""
    for t, degrees, chance in [
        (12.706, 1, 0.05),
        (4.303, 2, 0.05),
        (9.925, 2, 0.01),
        (2.776, 4, 0.05),
        (2.0003, 60, 0.05),
    ]:
        assert student(t, degrees) == pytest.approx(chance, rel=1e-3)
    assert student(0.0107 / 0.0029, 2) == pytest.approx(0.066, abs=1e-3)  # more than two standard errors, and no proof
    assert student(math.inf, 5) == 0.0
    assert score_interval([[1.0] * 50] * 2) == clopper_pearson(100, 100)
    assert score_interval([[1.0] * 50, [0.0] * 50]) == (0.0, 1.0)


def test_pairing_removes_what_both_share():
    generator = np.random.default_rng(1)
    shared = generator.normal(3.0, 1.0, 72_000)
    better = shared - 0.01 + generator.normal(0, 0.02, 72_000)
    found = paired_difference([cut(better, 360)], [cut(shared, 240)], Text(span=720))
    assert found.text.over == "100 spans of 720 tokens"  # every 720 tokens both end a segment
    assert found.nats == pytest.approx((better - shared).mean())
    assert found.error < 0.001
    assert found.chance < 1e-6
    longer = paired_difference([cut(better, 360)], [cut(shared, 240)], Text(span=1000))
    assert longer.text.over == "50 spans of 1,440 tokens"


def test_spans_apart_and_segments_moved_back_are_compared_and_different_text_not():
    a = [[1, 10, 5.0], [101, 10, 6.0], [201, 10, 7.0]]
    b = [[1, 7, 3.0], [8, 3, 1.0], [101, 7, 3.0], [108, 3, 2.0], [201, 7, 4.0], [208, 3, 2.0]]
    found = paired_difference([a], [b], Text(span=10))
    assert found.text.count == 3
    assert found.nats == pytest.approx((18 - 15) / 30)
    assert found.error is None
    assert paired_difference([[[1, 10, 5.0], [11, 10, 5.0]]], [[[2, 10, 5.0], [12, 10, 5.0]]]) is None
    assert paired_difference([[[1, 10, 5.0]]], [[[1, 5, 2.0], [6, 5, 2.0]]]).nats == pytest.approx(0.1)
