from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.data import load_tokenizer
from landmark.data.gpt2_tokenizer import GPT2_RANKS_SHA256
from landmark.utils.errors import UserError

BYTES = load_tokenizer("bytes")
TEXT = st.text(st.characters(codec="utf-8"))


@given(TEXT)
def test_bytes_round_trip(text: str):
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert BYTES.byte_lengths[ids].sum() == len(text.encode())


def test_special_ids_are_outside_text_and_inside_the_vocabulary(byte_tokenizer):
    assert (byte_tokenizer.eot, byte_tokenizer.landmark, byte_tokenizer.vocab_size) == (256, 257, 320)
    assert byte_tokenizer.byte_lengths[256:].sum() == 0
    assert byte_tokenizer.decode_bytes([97, 256, 98]) == b"ab"
    assert byte_tokenizer.decode_bytes([97, 256, 98], special=b" ") == b"a b"
    assert byte_tokenizer.dtype == np.uint16


def test_gpt2_ids_and_padding(gpt2):
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert (gpt2.eot, gpt2.landmark, gpt2.vocab_size) == (50256, 50260, 50304)
    assert len(gpt2.byte_lengths) == 50304
    assert gpt2.byte_lengths[[gpt2.eot, gpt2.landmark]].tolist() == [0, 0]
    assert gpt2.dtype == np.uint16


def test_gpt2_round_trip(gpt2):
    @given(TEXT)
    def holds(text: str):
        ids = gpt2.encode(text)
        assert gpt2.decode(ids) == text
        assert gpt2.byte_lengths[ids].sum() == len(text.encode())

    holds()


def test_gpt2_takes_end_of_text_in_a_text_for_text(gpt2):
    ids = gpt2.encode("<|endoftext|>")
    assert gpt2.eot not in ids
    assert gpt2.decode(ids) == "<|endoftext|>"


def test_gpt2_batch_equals_tiktoken(gpt2, tiktoken_gpt2, shared):
    texts = [(shared / "pg19-mini" / "validation" / f"{n}.txt").read_text()[:50_000] for n in (107, 408)]
    texts += ["<|endoftext|>".join(texts[0].splitlines()), "<|endoftext|>" * 3, "<|endoftext", ""]
    expected = tiktoken_gpt2.encode_ordinary_batch(texts, num_threads=2)
    assert [ids.tolist() for ids in map(gpt2.encode, texts)] == expected


def test_gpt2_equals_tiktoken_on_any_text(gpt2, tiktoken_gpt2):
    @given(st.lists(TEXT | st.just("<|endoftext|>")).map("".join))
    def holds(text: str):
        assert gpt2.encode(text).tolist() == tiktoken_gpt2.encode_ordinary(text)

    holds()


def test_gpt2_with_fewer_merges(gpt2, shared):
    small = load_tokenizer("gpt2", shared / "tokenizer" / "gpt2.tiktoken", vocab_size=1024)
    assert (small.name, small.eot, small.landmark, small.vocab_size) == ("gpt2-1024", 960, 961, 1024)
    text = (shared / "pg19-mini" / "validation" / "107.txt").read_text()[:50_000]
    ids = small.encode(text)
    assert ids.max() < small.eot
    assert small.decode(ids) == text
    assert small.byte_lengths[ids].sum() == len(text.encode())
    assert all(small.decode_bytes([token]) == gpt2.decode_bytes([token]) for token in range(small.eot))
    assert small.hash != gpt2.hash


@pytest.mark.parametrize("vocab_size", [256, 1000, 50368])
def test_impossible_vocabularies_are_refused(shared, vocab_size: int):
    with pytest.raises(UserError, match="multiple of 64 from 320 to 50304"):
        load_tokenizer("gpt2", shared / "tokenizer" / "gpt2.tiktoken", vocab_size=vocab_size)
    with pytest.raises(UserError, match="bytes has no vocab_size"):
        load_tokenizer("bytes", vocab_size=vocab_size)


def test_hashes_tell_tokenizers_apart(gpt2, byte_tokenizer):
    assert gpt2.hash != byte_tokenizer.hash
    assert load_tokenizer("bytes").hash == byte_tokenizer.hash


def test_ranks_file_with_the_wrong_hash_is_refused(tmp_path: Path):
    file = tmp_path / "gpt2.tiktoken"
    file.write_bytes(b"IQ== 0\n")
    with pytest.raises(UserError, match=f"{file}.*sha256.*{GPT2_RANKS_SHA256}"):
        load_tokenizer("gpt2", file)


def test_missing_ranks_file_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        load_tokenizer("gpt2", tmp_path / "absent")


def test_no_file_and_no_network_says_what_to_set(monkeypatch):
    from tiktoken_ext import openai_public

    def unreachable():
        raise ConnectionError("no route to host")

    monkeypatch.setattr(openai_public, "r50k_base", unreachable)
    whole = load_tokenizer("gpt2")  # its identity needs no ranks
    assert (whole.name, whole.vocab_size) == ("gpt2", 50304)
    with pytest.raises(UserError, match=r"set tokenizer\.file .*, or choose tokenizer=bytes"):
        whole.encode("a text")
    with pytest.raises(UserError, match=r"set tokenizer\.file"):
        _ = whole.byte_lengths


def test_unknown_tokenizer_and_needless_file_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="gpt2, code, bytes, symbols or pretrained"):
        load_tokenizer("words")
    with pytest.raises(UserError, match="bytes has no file"):
        load_tokenizer("bytes", tmp_path)
