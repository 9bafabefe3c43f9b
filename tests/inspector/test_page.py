"""The page has the values of the trace, and no text of it is taken for HTML."""

import base64
import itertools
import json
import re
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.inspector.page import NATS, SCRIPTS, UNIT, _characters, render
from landmark.inspector.trace import Trace, trace_retrieval
from tests.inspector.conftest import LOCAL, TEXT, TOKENIZER, model_of


def data_of(page: str, trace: Trace) -> tuple[dict, dict[str, np.ndarray]]:
    """The JSON and the arrays of a page, unpacked as in a browser."""
    scripts = dict(re.findall(r'<script type="[^"]+" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    content = json.loads(scripts["content"])
    raw, arrays = zlib.decompress(base64.b64decode(scripts["data"])), {}
    for name, size in content["sizes"].items():
        low, high = np.frombuffer(raw[: 2 * size], np.uint8).reshape(2, size).astype(np.uint16)
        arrays[name] = (low | high << 8).reshape(getattr(trace, name).shape)
        raw = raw[2 * size :]
    assert not raw
    return content, arrays


@pytest.mark.parametrize("cmt", [False, True])
def test_the_page_has_the_values_of_the_trace(tokens, cmt):
    trace = trace_retrieval(model_of(cmt=cmt), tokens, LOCAL)
    content, arrays = data_of(render(trace, TOKENIZER, "a text", {"k": 4}), trace)
    np.testing.assert_array_equal(arrays["blocks"], trace.blocks)
    np.testing.assert_allclose(arrays["weights"] / UNIT, trace.weights, atol=0.5 / UNIT)
    np.testing.assert_allclose(arrays["losses"] / NATS, trace.losses, atol=0.5 / NATS)
    assert ("cmt_weights" in arrays) == cmt
    if trace.cmt_weights is not None:
        np.testing.assert_allclose(arrays["cmt_weights"] / UNIT, trace.cmt_weights, atol=0.5 / UNIT)
    assert "".join(content["tokens"]) == TEXT * 2
    assert len(content["tokens"]) == len(tokens)
    assert content["chunks"] == trace.chunks
    assert content["blockSize"] == trace.block_size


def test_no_text_ends_its_element(tokens):
    page = render(
        trace_retrieval(model_of(), tokens, LOCAL), TOKENIZER, "</title><script>", {"run": "</script><b>{{data}}"}
    )
    assert page.count("</script>") == page.count("<script") == 2 + len(SCRIPTS)
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


def test_bytes_that_are_no_text_are_marked():
    assert _characters([b"a", b"\xff", b"\xe2\x82", b"b", b"\xc3"]) == ["a", "�", "�", "b", "�"]
