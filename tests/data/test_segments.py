import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.data import Segment, segments
from landmark.utils.errors import UserError


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


def test_a_length_that_does_not_divide_the_span_moves_the_last_segment_back():
    assert segments(11, 4, tokens=10, span=10) == [Segment(0, 4, 4), Segment(4, 4, 4), Segment(6, 4, 2)]
    assert Segment(6, 4, 2).targets == (9, 11)


def test_spans_are_spread_over_the_split():
    assert [segment.start for segment in segments(1001, 10, tokens=40, span=10)] == [0, 250, 500, 750]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream_length": 8, "length": 8}, r"eval\.length=8 is longer than the split"),
        ({"stream_length": 8, "length": 0}, "at least 1 token"),
        ({"stream_length": 99, "length": 9, "tokens": 50, "span": 8}, r"raise eval\.span to at least 9"),
        (
            {"stream_length": 99, "length": 9, "tokens": 50, "span": 99},
            r"eval\.span=99 is longer than the split",
        ),
        ({"stream_length": 99, "length": 9, "tokens": 0, "span": 9}, "at least 1"),
    ],
)
def test_impossible_cuts_are_refused(arguments: dict[str, int], message: str):
    with pytest.raises(UserError, match=message):
        segments(**arguments)
