"""What an evaluation reads: segments, and the texts of probes with the tokens that count."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.config.schema import EvalConfig
from landmark.data import Segment, Stream, load_tokenizer, segments
from landmark.data.evaluation_texts import probe_texts
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


@pytest.fixture
def stream(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    return Stream(tmp_path / "x.bin", tokens, hashlib.sha256(tokens.tobytes()).hexdigest(), 1, 1000, 100)


def texts(stream, probe, length, prompts, split="test"):
    return probe_texts(EvalConfig(task=probe, length=length, prompts=prompts, split=split), stream, TOKENIZER)


@pytest.mark.parametrize(("length", "prompts"), [(4, 7), (60, 5), (222, 9), (1998, 1)])
def test_a_stretch_of_the_split_comes_twice_and_both_are_counted_from_their_second_token_on(stream, length, prompts):
    copies, half = texts(stream, "copy", length, prompts), length // 2
    assert (copies.compared, copies.counted) == (range(1, half), range(half + 1, length))
    assert copies.tokens.shape == (prompts, length)
    assert copies.tokens.dtype == np.int64
    for tokens, start in zip(copies.tokens, copies.starts, strict=True):
        stretch = stream.tokens[start - 1 : start - 1 + half]  # the first token of a stretch is not counted
        np.testing.assert_array_equal(tokens, [*stretch, *stretch])


def test_stretches_lie_evenly_over_the_split_and_do_not_overlap(stream):
    starts = np.array(texts(stream, "copy", 60, 20).starts)
    gaps = np.diff(starts)
    assert starts[0] == 1
    assert gaps.min() >= 30
    assert gaps.max() - gaps.min() <= 1
    assert starts[-1] + 30 + gaps.max() >= 1000


def test_pairs_come_again_in_another_order(stream):
    pairs = texts(stream, "recall", 80, 6)
    assert pairs.tokens.shape == (6, 80)
    for tokens in pairs.tokens:
        told, asked = (list(map(tuple, half.reshape(20, 2))) for half in (tokens[:40], tokens[40:]))
        assert sorted(told) == sorted(asked)
        assert told != asked
        assert len({token for pair in told for token in pair}) == 40
        assert [value for _, value in asked] == tokens[pairs.counted].tolist()
    assert list(pairs.compared) == []
    assert len({tuple(tokens) for tokens in pairs.tokens}) == 6


def test_pairs_are_of_all_tokens_but_special_and_unused_ones(stream):
    drawn = texts(stream, "recall", 512, 3).tokens
    assert set(drawn.ravel().tolist()) == set(range(256)) == set(np.flatnonzero(TOKENIZER.byte_lengths))
    assert {TOKENIZER.eot, TOKENIZER.landmark}.isdisjoint(drawn.ravel().tolist())


def test_pairs_are_a_function_of_split_and_number(stream):
    five = texts(stream, "recall", 40, 5)
    np.testing.assert_array_equal(five.tokens[:3], texts(stream, "recall", 40, 3).tokens)
    assert five.starts[:3] == texts(stream, "recall", 40, 3).starts
    assert not (five.tokens == texts(stream, "recall", 40, 5, split="validation").tokens).all()


@pytest.mark.parametrize(
    ("probe", "length", "prompts", "said"),
    [
        ("copy", 222, 10, "eval.prompts=10: the test split has 1,000 tokens, that is 9 stretches of 111"),
        ("copy", 4000, 1, "that is 0 stretches of 2,000 for eval.task=copy: lower eval.prompts or eval.length"),
        (
            "recall",
            516,
            1,
            "eval.length=516: eval.task=recall needs 258 different tokens, and tokenizer=bytes has 256: "
            "lower eval.length to at most 512",
        ),
    ],
)
def test_a_split_or_a_vocabulary_too_small_is_refused(stream, probe, length, prompts, said):
    with pytest.raises(UserError) as error:
        texts(stream, probe, length, prompts)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
