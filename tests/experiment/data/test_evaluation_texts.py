"""What an evaluation reads: segments, stretches that come twice; bytes and words of a text."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from landmark.experiment.config.schema import EvalConfig
from landmark.experiment.data import Segment, Stream, TextSize, load_tokenizer, segments, text_size
from landmark.experiment.data.evaluation_texts import copies, word_starts
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


@pytest.fixture
def stream():
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    return Stream(tokens, "")


def texts(stream, length, prompts):
    return copies(EvalConfig(task="copy", length=length, prompts=prompts, split="test"), stream)


@pytest.mark.parametrize(("length", "prompts"), [(4, 7), (60, 5), (222, 9), (1998, 1)])
def test_a_stretch_of_the_split_comes_twice(stream, length, prompts):
    twice, starts = texts(stream, length, prompts)
    assert twice.shape == (prompts, length)
    assert twice.dtype == np.int64
    for tokens, start in zip(twice, starts, strict=True):
        stretch = stream.tokens[start : start + length // 2]
        np.testing.assert_array_equal(tokens, [*stretch, *stretch])


def test_spans_and_stretches_lie_evenly_over_the_split_and_do_not_overlap(stream):
    starts = np.array(texts(stream, 60, 20)[1])
    gaps = np.diff(starts)
    assert starts[0] == 0
    assert gaps.min() >= 30
    assert gaps.max() - gaps.min() <= 1
    assert starts[-1] + 30 + gaps.max() >= 999
    assert [segment.start for segment in segments(1001, 10, tokens=40, span=10)] == [0, 250, 500, 750]


def test_cuts_and_stretches_that_a_split_is_too_short_for_are_refused(stream):
    for cut, said in (
        (lambda: segments(8, 8), r"eval\.length=8 is longer than the split"),
        (lambda: segments(99, 9, 50, 99), r"eval\.span=99 is longer than the split"),
        (lambda: texts(stream, 222, 10), "eval.prompts=10: the test split has 1,000 tokens, .* 9 stretches of 111"),
        (lambda: texts(stream, 4000, 1), "0 stretches of 2,000 for eval.task=copy: lower eval.prompts or eval.length"),
    ):
        with pytest.raises(UserError, match=said):
            cut()


SPACES = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2000\u200a\u200b\u2028\u202f\u205f\u3000\ufeff"
SPACED = st.text(st.sampled_from(f"ab\u00e9\u4e8c{SPACES}") | st.characters(codec="utf-8"))


@given(SPACED)
@example("a".join(chr(code) for code in range(0x110000) if chr(code).isspace()))
@example("".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000))
def test_words_are_those_of_split(text: str):
    assert len(word_starts(text.encode())) == len(text.split())


@given(st.lists(SPACED, min_size=1, max_size=4), st.data())
def test_sizes_of_adjacent_ranges_add_up(texts: list[str], data: st.DataObject):
    stream = np.concatenate([np.append(TOKENIZER.encode(text), TOKENIZER.eot) for text in texts])
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=5))
    edges = sorted({0, len(stream), *cuts})
    sizes = [text_size(stream, [edge], TOKENIZER) for edge in pairwise(edges)]
    whole = TextSize(sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts))
    assert TextSize(sum(size.num_bytes for size in sizes), sum(size.words for size in sizes)) == whole
    assert text_size(stream, list(pairwise(edges)), TOKENIZER) == whole


def test_sizes_of_a_gpt2_stream(gpt2):
    text = "Naïve\u00a0folk, 二 say “café”…"
    stream = np.append(gpt2.encode(text), gpt2.eot)
    cuts = [(at, at + 1) for at in range(len(stream))]
    assert text_size(stream, cuts, gpt2) == TextSize(len(text.encode()), len(text.split()))
