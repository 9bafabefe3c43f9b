"""The tokenizers `bytes`, `code` and `gpt2`, and the program that learns the ranks of `code`."""

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.experiment.data import load_tokenizer, tokenizers
from landmark.experiment.data.stdlib import StandardLibrary
from landmark.experiment.data.tokenizers import GPT2_RANKS_SHA256
from landmark.utils.errors import UserError

LIKE_CODE = st.text(st.sampled_from("ab_ÄZ09 ().'\"\n\r\t\v\u2028\u3000é二"))
TEXT = st.text(st.characters(codec="utf-8")) | LIKE_CODE
KINDS = {  # name, end of text, landmark, size of the vocabulary
    "bytes": ("bytes", 256, 257, 320),
    "code": ("code", 960, 961, 1024),
    "gpt2": ("gpt2", 50256, 50260, 50304),
    "gpt2_1024": ("gpt2-1024", 960, 961, 1024),
}


@pytest.fixture
def tokenizer(request):
    """One of KINDS."""
    if not request.param.startswith("gpt2"):
        return load_tokenizer(request.param)
    whole = request.getfixturevalue("gpt2")
    file = request.getfixturevalue("shared") / "tokenizer" / "gpt2.tiktoken"
    return whole if request.param == "gpt2" else load_tokenizer("gpt2", file, vocab_size=1024)


every_kind = pytest.mark.parametrize("tokenizer", KINDS, indirect=True)


@every_kind
def test_any_text_round_trips(tokenizer):
    @given(TEXT)
    def holds(text: str):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())

    holds()


@every_kind
def test_special_ids_are_outside_text_and_inside_the_vocabulary(tokenizer, request):
    name = request.node.callspec.params["tokenizer"]
    assert (tokenizer.name, tokenizer.eot, tokenizer.landmark, tokenizer.vocab_size) == KINDS[name]
    assert tokenizer.dtype == np.uint16
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size
    assert tokenizer.byte_lengths[: tokenizer.eot].min() == 1
    assert tokenizer.byte_lengths[tokenizer.eot :].sum() == 0
    assert tokenizer.encode("<|endoftext|>").max() < tokenizer.eot
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.decode_bytes([a, tokenizer.eot, b]) == b"ab"
    assert tokenizer.decode_bytes([a, tokenizer.eot, b], special=b" ") == b"a b"


def test_hashes_tell_tokenizers_apart_and_are_those_of_earlier_runs(gpt2, shared):
    kinds = [load_tokenizer("bytes"), load_tokenizer("code"), gpt2]
    kinds.append(load_tokenizer("gpt2", shared / "tokenizer" / "gpt2.tiktoken", vocab_size=1024))
    assert len({kind.hash for kind in kinds}) == 4
    pieces = [[kind.decode_bytes([token]) for token in range(kinds[3].eot)] for kind in kinds[2:]]
    assert pieces[0] == pieces[1], "fewer merges are the first of them"
    assert load_tokenizer("bytes").hash == kinds[0].hash
    assert kinds[1].hash == "4f5e55a4ff55a6cc83ba7b73ed4eeb13871befa99c80143ee4db5c128537ed90"


def test_gpt2_equals_tiktoken(gpt2, tiktoken_gpt2, shared):
    texts = [(shared / "pg19-mini" / "validation" / f"{n}.txt").read_text()[:50_000] for n in (107, 408)]
    texts += ["<|endoftext|>".join(texts[0].splitlines()), "<|endoftext|>" * 3, "<|endoftext", ""]
    expected = tiktoken_gpt2.encode_ordinary_batch(texts, num_threads=2)
    assert [ids.tolist() for ids in map(gpt2.encode, texts)] == expected
    assert gpt2.encode("hello world").tolist() == [31373, 995]

    @given(st.lists(TEXT | st.just("<|endoftext|>")).map("".join))
    def holds(text: str):
        assert gpt2.encode(text).tolist() == tiktoken_gpt2.encode_ordinary(text)

    holds()


def test_python_source_takes_lines_with_their_indentation_and_more_than_2_4_bytes_a_token(monkeypatch):
    """Its ranks come with the program: no connection is opened, and changed ones are refused."""

    def refuse(*_, **__):
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    code = load_tokenizer("code")
    tokens = [code.decode([token]) for token in code.encode("return self\n        return")]
    assert tokens == ["return", " self", "\n        ", "return"]
    text = "".join(document.text for document in StandardLibrary().documents("test"))
    assert len(text.encode()) / len(code.encode(text)) > 2.4
    monkeypatch.setattr(tokenizers, "CODE_RANKS_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"code\.tiktoken is damaged, its SHA-256 differs .*: install landmark again"):
        load_tokenizer("code")


@pytest.mark.parametrize("run", [" ", "\n", "\t\n", "_", " _", "\v", " \t", "a", "."])
def test_long_runs_are_encoded(run: str):
    code, text = load_tokenizer("code"), run * (1_200_000 // len(run)) + "é"
    assert code.decode(code.encode(text)) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("words",), "gpt2, code, bytes or pretrained"),
        (("bytes", "file"), "tokenizer.file=file: tokenizer=bytes has no file, set tokenizer.file=null"),
        (("bytes", None, 512), "tokenizer=bytes has no vocab_size, set tokenizer.vocab_size=null"),
        (("code", "file"), "tokenizer=code has no file, set tokenizer.file=null"),
        (("code", None, 512), "tokenizer=code has no vocab_size, set tokenizer.vocab_size=null"),
        (("gpt2", None, 256), "multiple of 64 from 320 to 50304"),
        (("gpt2", None, 1000), "multiple of 64 from 320 to 50304"),
        (("gpt2", None, 50368), "multiple of 64 from 320 to 50304"),
        (("gpt2", "absent"), r"absent does not exist: name another tokenizer\.file"),
        (("gpt2", __file__), f"{__file__} is damaged, its SHA-256 differs from {GPT2_RANKS_SHA256[:10]}"),
    ],
)
def test_unknown_tokenizers_impossible_vocabularies_and_wrong_files_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(*settings)


def test_no_file_and_no_network_says_what_to_set(monkeypatch):
    from tiktoken_ext import openai_public

    def unreachable():
        raise ConnectionError("no route to host")

    monkeypatch.setattr(openai_public, "r50k_base", unreachable)
    whole = load_tokenizer("gpt2")  # its identity needs no ranks
    assert (whole.name, whole.vocab_size) == ("gpt2", 50304)
    with pytest.raises(UserError, match=r"^GPT-2's ranks, which .* set tokenizer\.file .*, or choose tokenizer=bytes"):
        whole.encode("a text")
    with pytest.raises(UserError, match=r"set tokenizer\.file"):
        _ = whole.byte_lengths
