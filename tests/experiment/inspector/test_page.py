"""`task=inspect` from a command to a page, which has the values of the trace and takes no text for HTML."""

import base64
import hashlib
import html
import io
import itertools
import json
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.experiment.config import to_config
from landmark.experiment.inspector.page import NATS, SCRIPTS, UNIT, _characters, filled_page, render
from landmark.experiment.inspector.trace import Trace, trace_retrieval
from tests.configurations import compose_conf
from tests.experiment.inspector.conftest import BLOCK, LOCAL, TEXT, TOKENIZER, model_of
from tests.saved import saved_run
from tests.workplace import run_task

LONG = TEXT * 7  # more than a chunk of 250


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
    trace = trace_retrieval(model_of(), tokens, LOCAL)
    page = render(trace, TOKENIZER, "</title><script>", {"run": "</script><b>{{data}}"})
    assert page.count("</script>") == page.count("<script") == 2 + len(SCRIPTS)
    assert page.count("<b>") == page.split("<script", 1)[0].count("<b>"), "none but those of the explanation"
    assert "<title>&lt;/title&gt;&lt;script&gt;: what" in page


@settings(max_examples=30)
@given(st.text(), st.data())
def test_characters_belong_to_the_piece_they_begin_in(text, data):
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
    starts = np.cumsum([0, *(len(letter.encode()) for letter in text)])
    edges = [0, *cuts, len(whole)]
    expected = ["".join(c for c, at in zip(text, starts) if a <= at < b) for a, b in itertools.pairwise(edges)]
    assert _characters(pieces) == expected


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    """A function that runs the task in a folder with a model and a book, and returns its output."""
    config = to_config(compose_conf(["size=nano", "tokenizer=bytes", "model=landmark"]))
    saved_run(tmp_path / "DIR", config=config, block_size=BLOCK)
    (tmp_path / "book.txt").write_text(LONG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        run_task(*words, "trainer=cpu")
        return capsys.readouterr().out

    return run


def test_a_command_writes_a_page_whose_file_and_prompt_are_one_text(inspect, tmp_path, monkeypatch):
    said = inspect("task=inspect", "run=DIR", "tokenizer=bytes", "prompt_file=book.txt")
    path = Path("outputs/inspect/book-DIR.html")
    tokens = len(LONG.encode())
    assert said == f"{path}: {tokens} tokens, {tokens // 5} blocks, {path.stat().st_size / 1e6:.1f} MB\n"
    content, _ = data_of(path.read_text(encoding="utf-8"), trace_retrieval(model_of(), TOKENIZER.encode(LONG)))
    assert "".join(content["tokens"]) == LONG
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no temporary file is left"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LONG[:200].encode())))
    words = ["task=inspect", "run=DIR", "tokenizer=bytes", "prompt_file=-", f"output={tmp_path / 'a'}"]
    said = inspect(*words, f"prompt='{LONG[200:250].replace(chr(10), ' ')}'", "eval.local=50", "memory.blocks=9")
    path = tmp_path / "a" / "inspect" / "prompt-DIR.html"
    assert said.startswith(f"{path}: ")
    assert '"title":"prompt"' in (page := path.read_text(encoding="utf-8"))
    assert '"chunks of":50,"k":4,"max blocks":9' in page


def test_the_policy_has_the_hash_of_each_style_and_script():
    page = filled_page(content={}, title="", data="")
    elements = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, re.DOTALL)
    assert len(elements) == 1 + len(SCRIPTS), "a script holds the end of one"
    allowed = html.unescape(page)
    for text in elements:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in allowed
    assert "unsafe-inline" not in page
    with pytest.raises(ValueError, match="not JSON compliant"):
        filled_page(content={"k": float("nan")}, title="", data="")
