from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from landmark.data import TextSize, load_tokenizer, text_size
from landmark.data.bytes_and_words import word_starts

BYTES = load_tokenizer("bytes")
SPACED = st.text(
    st.sampled_from(
        "ab\u00e9\u4e8c \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2000\u200a\u200b\u2028\u202f\u205f\u3000\ufeff"
    )
    | st.characters(codec="utf-8")
)


@given(SPACED)
@example("".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000))
def test_words_are_those_of_split(text: str):
    assert len(word_starts(text.encode())) == len(text.split())


@given(st.lists(SPACED, min_size=1, max_size=4), st.data())
def test_sizes_of_adjacent_ranges_add_up(texts: list[str], data: st.DataObject):
    stream = np.concatenate([np.append(BYTES.encode(text), BYTES.eot) for text in texts])
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=5))
    edges = sorted({0, len(stream), *cuts})
    sizes = [text_size(stream, [edge], BYTES) for edge in pairwise(edges)]
    whole = TextSize(sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts))
    assert TextSize(sum(size.num_bytes for size in sizes), sum(size.words for size in sizes)) == whole
    assert text_size(stream, list(pairwise(edges)), BYTES) == whole


def test_a_word_counts_where_it_begins():
    stream = BYTES.encode("one two")
    assert text_size(stream, [(0, 5)], BYTES).words == 2
    assert text_size(stream, [(5, 7)], BYTES) == TextSize(2, 0)


def test_ranges_outside_the_stream_are_refused():
    with pytest.raises(ValueError, match="not inside a stream of 3 tokens"):
        text_size(BYTES.encode("abc"), [(1, 4)], BYTES)


def test_sizes_of_a_gpt2_stream(gpt2):
    text = "Naïve\u00a0folk, 二 say “café”…"
    stream = np.append(gpt2.encode(text), gpt2.eot)
    cuts = [(at, at + 1) for at in range(len(stream))]
    assert text_size(stream, cuts, gpt2) == TextSize(len(text.encode()), len(text.split()))
