"""The page holds what was read, and its text cannot get out of the place that it has."""

import base64
import itertools
import json
import re
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.inspector.page import NATS, UNIT, _characters, render
from landmark.inspector.reading import Reading, read
from tests.inspector.conftest import LOCAL, TEXT, TOKENIZER, model_of


def data_of(page: str, reading: Reading) -> tuple[dict, dict[str, np.ndarray]]:
    """The JSON of a page, and its arrays, as a browser finds them."""
    scripts = dict(re.findall(r'<script type="[^"]+" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    described = json.loads(scripts["described"])
    raw, arrays = zlib.decompress(base64.b64decode(scripts["data"])), {}
    for name, size in described["sizes"].items():
        low, high = np.frombuffer(raw[: 2 * size], np.uint8).reshape(2, size).astype(np.uint16)
        arrays[name] = (low | high << 8).reshape(getattr(reading, name).shape)
        raw = raw[2 * size :]
    assert not raw
    return described, arrays


@pytest.mark.parametrize("cmt", [False, True])
def test_it_holds_the_reading(tokens, cmt):
    reading = read(model_of(cmt=cmt), tokens, LOCAL)
    described, arrays = data_of(render(reading, TOKENIZER, "a text", {"k": 4}), reading)
    np.testing.assert_array_equal(arrays["blocks"], reading.blocks)
    np.testing.assert_allclose(arrays["weights"] / UNIT, reading.weights, atol=0.5 / UNIT)
    np.testing.assert_allclose(arrays["losses"] / NATS, reading.losses, atol=0.5 / NATS)
    assert ("missed" in arrays) == cmt
    if reading.missed is not None:
        np.testing.assert_allclose(arrays["missed"] / UNIT, reading.missed, atol=0.5 / UNIT)
    assert "".join(described["tokens"]) == TEXT * 2
    assert len(described["tokens"]) == len(tokens)
    assert described["chunks"] == reading.chunks
    assert described["blockSize"] == reading.block_size


def test_no_text_ends_its_element(tokens):
    page = render(read(model_of(), tokens, LOCAL), TOKENIZER, "</title><script>", {"run": "</script><b>{{data}}"})
    assert page.count("</script>") == page.count("<script") == 3
    assert page.count("<b>") == page.split("<script", 1)[0].count("<b>"), "none but those of the explanation"
    assert "<title>&lt;/title&gt;&lt;script&gt;: what" in page


@given(st.text(), st.data())
def test_characters_belong_to_the_piece_they_begin_in(text, data):
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
    starts = np.cumsum([0, *(len(letter.encode()) for letter in text)])
    edges = [0, *cuts, len(whole)]
    expected = ["".join(c for c, at in zip(text, starts) if a <= at < b) for a, b in itertools.pairwise(edges)]
    assert _characters(pieces) == expected


def test_what_is_no_text_is_marked():
    assert _characters([b"a", b"\xff", b"\xe2\x82", b"b", b"\xc3"]) == ["a", "�", "�", "b", "�"]
