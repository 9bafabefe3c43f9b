"""Blocks of different lengths: the rule against a loop over tokens, and the places of a stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.utils import block_places
from landmark.utils.block_ends import BlockEnds, line_ends, sentence_ends
from landmark.utils.block_places import BlockPlaces, block_starts, closed_blocks, places_of_tokens

STOP, EOT, LANDMARK = 7, 9, 11
texts = st.lists(st.sampled_from([1, 2, 3, 4, STOP, EOT]), max_size=60).map(lambda ids: np.array(ids, dtype=np.int64))


@st.composite
def rules(draw):
    block_size = draw(st.integers(1, 8))
    return BlockEnds(block_size, draw(st.integers(1, block_size)), (STOP,), EOT)


def written_out(rule, tokens, filled=0):
    """The places of a text, token by token: ids, "L" for landmarks and "·" for empty places."""
    places, size = [], filled
    for token in tokens.tolist():
        places.append(token)
        size += 1
        if size == rule.block_size or token == EOT or (token == STOP and size >= rule.least):
            places += ["·"] * (rule.block_size - size) + ["L"]
            size = 0
    return places


def test_the_drawn_example():
    rule = BlockEnds(4, 2, (ord("."),), ord("E"))
    tokens = np.array([ord(c) for c in "abc.defgh.Ei."])
    found = "".join(p if isinstance(p, str) else chr(p) for p in _drawn(rule, tokens))
    assert found + "··L" == "abc.LdefgLh.··LE···Li.··L"  # places behind the last token are left out


def _drawn(rule, tokens):
    view = BlockPlaces(block_starts(tokens, rule), rule.block_size + 1)
    token, is_landmark, is_empty = view.tokens(np.arange(view.num_places))
    return ["L" if lm else "·" if e else int(tokens[t]) for t, lm, e in zip(token, is_landmark, is_empty, strict=True)]


@given(rules(), texts)
def test_the_places_of_a_stream_are_those_written_out(rule, tokens):
    expected = written_out(rule, tokens)
    while expected and isinstance(expected[-1], str):
        expected.pop()
    assert _drawn(rule, tokens) == expected


@given(rules(), texts)
def test_at_a_landmark_and_an_empty_place_stands_the_next_token(rule, tokens):
    view = BlockPlaces(block_starts(tokens, rule), rule.block_size + 1)
    token, is_landmark, is_empty = view.tokens(np.arange(view.num_places))
    following = 0
    for number, other in zip(token.tolist(), (is_landmark | is_empty).tolist(), strict=True):
        assert number == following
        following += not other


@given(rules(), texts, st.integers(0, 7))
def test_places_of_a_chunk_that_continues_a_block(rule, tokens, filled):
    filled = min(filled, rule.block_size - 1)
    expected = written_out(rule, tokens, filled)
    closed = closed_blocks(tokens, rule, filled)
    places, total = places_of_tokens(closed, len(tokens), rule.block_size + 1, filled)
    assert total == len(expected)
    assert [expected[place] for place in places] == tokens.tolist()


@given(rules(), texts, st.integers(1, 9))
@settings(max_examples=50)
def test_chunks_and_pieces_are_cut_as_the_whole_text(rule, tokens, size):
    whole = closed_blocks(tokens, rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_places, "PIECE", size)
        np.testing.assert_array_equal(closed_blocks(tokens, rule), whole)
    found, filled = [], 0
    for first in range(0, len(tokens), size):
        chunk = tokens[first : first + size]
        closed = closed_blocks(chunk, rule, filled)
        found += (first + closed).tolist()
        filled = len(chunk) - int(closed[-1]) if len(closed) else filled + len(chunk)
    assert found == whole.tolist()


@pytest.mark.parametrize(
    ("piece", "sentence", "line"),
    [
        (b".", True, False),
        (b'."', True, False),
        ("?”".encode(), True, False),
        (b"!)", True, False),
        (b".\n", True, True),
        (b"\n\n", False, True),
        (b" Mr", False, False),
        (b".5", False, False),
        (b",", False, False),
        (b"", False, False),
        ("”".encode(), False, False),
        (b"\xe2\x80", False, False),
    ],
)
def test_tokens_that_end_a_sentence_or_a_line(piece, sentence, line):
    assert (sentence_ends([b"a", piece]) == (1,)) == sentence
    assert (line_ends([b"a", piece]) == (1,)) == line
