"""What an evaluation reads: segments, and the texts of probes with the tokens that count."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.config.schema import EvalConfig
from landmark.data import Segment, Stream, load_tokenizer, segments
from landmark.data.evaluation_texts import copies
from landmark.utils.errors import UserError

TOKENIZER = load_tokenizer("bytes")


def targets(cut: list[Segment]) -> list[int]:
    return [token for segment in cut for token in range(*segment.targets)]


@given(st.integers(1, 40), st.integers(0, 400))
def test_whole_split_is_cut_without_the_last_segment(length: int, more: int):
    tokens = length + 1 + more
    cut = segments(tokens, length)
    expected = [(first, length, length) for first in range(0, tokens, length)][:-1]
    assert [(segment.start, segment.length, segment.counted) for segment in cut] == expected
    assert targets(cut) == list(range(1, len(cut) * length + 1))


@given(st.data())
def test_budget_counts_the_same_predictions_for_every_length(data: st.DataObject):
    span = data.draw(st.integers(1, 60))
    tokens = data.draw(st.integers(span + 1, 2000))
    budget = data.draw(st.integers(1, 2500))
    lengths = data.draw(st.lists(st.integers(1, span), min_size=2, max_size=2))
    first, second = (segments(tokens, length, budget, span) for length in lengths)
    assert sorted(targets(first)) == sorted(targets(second))
    for length, cut in zip(lengths, (first, second)):
        assert all(segment.length == length and 1 <= segment.counted <= length for segment in cut)
        assert all(segment.start >= 0 and segment.targets[1] <= tokens for segment in cut)
        assert len(set(targets(cut))) == len(targets(cut))
        assert len(targets(cut)) == span * min(max(1, budget // span), (tokens - 1) // span)


def test_spans_are_spread_over_the_split():
    assert [segment.start for segment in segments(1001, 10, tokens=40, span=10)] == [0, 250, 500, 750]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream_length": 8, "length": 8}, r"eval\.length=8 is longer than the split"),
        (
            {"stream_length": 99, "length": 9, "tokens": 50, "span": 99},
            r"eval\.span=99 is longer than the split",
        ),
    ],
)
def test_impossible_cuts_are_refused(arguments: dict[str, int], message: str):
    with pytest.raises(UserError, match=message):
        segments(**arguments)


@pytest.fixture
def stream(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    return Stream(tmp_path / "x.bin", tokens, hashlib.sha256(tokens.tobytes()).hexdigest(), 1, 1000, 100)


def texts(stream, length, prompts):
    return copies(EvalConfig(task="copy", length=length, prompts=prompts, split="test"), stream)


@pytest.mark.parametrize(("length", "prompts"), [(4, 7), (60, 5), (222, 9), (1998, 1)])
def test_a_stretch_of_the_split_comes_twice_and_both_are_counted_from_their_second_token_on(stream, length, prompts):
    twice, half = texts(stream, length, prompts), length // 2
    assert (twice.compared, twice.counted) == (range(1, half), range(half + 1, length))
    assert twice.tokens.shape == (prompts, length)
    assert twice.tokens.dtype == np.int64
    for tokens, start in zip(twice.tokens, twice.starts, strict=True):
        stretch = stream.tokens[start - 1 : start - 1 + half]  # the first token of a stretch is not counted
        np.testing.assert_array_equal(tokens, [*stretch, *stretch])


def test_stretches_lie_evenly_over_the_split_and_do_not_overlap(stream):
    starts = np.array(texts(stream, 60, 20).starts)
    gaps = np.diff(starts)
    assert starts[0] == 1
    assert gaps.min() >= 30
    assert gaps.max() - gaps.min() <= 1
    assert starts[-1] + 30 + gaps.max() >= 1000


@pytest.mark.parametrize(
    ("length", "prompts", "said"),
    [
        (222, 10, "eval.prompts=10: the test split has 1,000 tokens, that is 9 stretches of 111"),
        (4000, 1, "that is 0 stretches of 2,000 for eval.task=copy: lower eval.prompts or eval.length"),
    ],
)
def test_a_split_too_small_is_refused(stream, length, prompts, said):
    with pytest.raises(UserError, match=said):
        texts(stream, length, prompts)
