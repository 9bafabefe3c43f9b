"""The tokenizer `code`, and the program that learns its ranks."""

import asyncio
import hashlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from landmark.data import code_tokenizer, load_tokenizer
from landmark.data.byte_pairs import BytePairTokenizer, read_ranks
from landmark.data.code_ranks import excerpts, learn_ranks, main
from landmark.data.code_tokenizer import CODE_PATTERN, CodeTokenizer
from landmark.data.stdlib import StandardLibrary
from landmark.utils.errors import UserError

CODE = load_tokenizer("code")
LIKE_CODE = st.text(st.sampled_from("ab_ÄZ09 ().'\"\n\r\t\v\u2028\u3000é二"))
TEXT = st.text(st.characters(codec="utf-8")) | LIKE_CODE


@given(TEXT)
def test_any_text_round_trips(text: str):
    ids = CODE.encode(text)
    assert CODE.decode(ids) == text
    assert CODE.byte_lengths[ids].sum() == len(text.encode())


def test_special_ids_are_outside_text_and_inside_the_vocabulary():
    assert (CODE.name, CODE.eot, CODE.landmark, CODE.vocab_size) == ("code", 960, 961, 1024)
    assert CODE.byte_lengths[:960].min() == 1
    assert CODE.byte_lengths[960:].sum() == 0
    assert CODE.encode("<|endoftext|>").max() < CODE.eot


def test_hash_is_that_of_earlier_runs():
    assert CODE.hash == "4f5e55a4ff55a6cc83ba7b73ed4eeb13871befa99c80143ee4db5c128537ed90"


def test_an_end_of_line_and_its_indentation_are_one_token():
    assert [CODE.decode([token]) for token in CODE.encode("return self\n        return")] == [
        *("return", " self", "\n        ", "return")
    ]


def test_python_source_takes_more_than_2_4_bytes_a_token():
    text = "".join(document.text for document in StandardLibrary().documents("test"))
    assert len(text.encode()) / len(CODE.encode(text)) > 2.4


@pytest.mark.parametrize("run", [" ", "\n", "\t\n", "_", " _", "\v", " \t", "a", "."])
def test_long_runs_are_encoded(run: str):
    text = run * (1_200_000 // len(run)) + "é"
    assert CODE.decode(CODE.encode(text)) == text


@pytest.mark.parametrize(("key", "value"), [("file", "code.tiktoken"), ("vocab_size", 512)])
def test_needless_settings_are_refused(key: str, value):
    with pytest.raises(
        UserError, match=f"tokenizer.{key}={value}: tokenizer=code has no {key}, set tokenizer.{key}=null"
    ):
        load_tokenizer("code", **{key: value})


def test_changed_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(code_tokenizer, "CODE_RANKS_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"code\.tiktoken of landmark\.data was changed: its sha256 is \w{64}"):
        CodeTokenizer()


def test_no_connection_is_opened(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer("code").encode("self").size == 1


def test_the_most_frequent_pairs_get_the_first_ranks_after_the_bytes():
    ranks = learn_ranks("xy xy (xy) xyz", 260)  # xy four times, then its join with a space twice, the others once
    assert [ranks[bytes([value])] for value in range(256)] == list(range(256))
    assert (ranks[b"xy"], ranks[b" xy"]) == (256, 257)
    assert {b" xyz", b" ("} == {piece for piece, rank in ranks.items() if rank >= 258}


def test_a_text_with_too_few_pairs_is_refused():
    with pytest.raises(UserError, match="a text of 4 characters has too few pairs of bytes for 300 ranks"):
        learn_ranks("abab", 300)


@given(st.integers(0, 1_500_000))
def test_excerpts_are_few_and_keep_a_short_text(length: int):
    text = "abcdefghij" * (length // 10)
    taken = excerpts(text)
    assert len(taken) <= 400_000
    assert len(text) > 400_000 or taken == text


def test_the_program_writes_a_file_that_can_be_used(tmp_path: Path, capsys):
    folder, out = tmp_path / "source", tmp_path / "out.tiktoken"
    folder.mkdir()
    for file in Path(asyncio.__file__).parent.glob("*.py"):
        (folder / file.name).write_text(file.read_text(encoding="utf-8")[:300], encoding="utf-8")
    main(str(out), str(folder))
    sha256 = hashlib.sha256(out.read_bytes()).hexdigest()
    assert capsys.readouterr().out == f"{out}: sha256 {sha256}\n"
    ranks = read_ranks(out.read_bytes(), sha256, "out")
    own = BytePairTokenizer("own", lambda: ranks, sha256, CODE_PATTERN, (960, 961, 1024))
    text = Path(asyncio.__file__).read_text(encoding="utf-8")
    assert own.decode(own.encode(text)) == text
    assert len(own.encode(text)) < len(text) / 2


def test_the_program_ends_with_one_line_at_bad_input(tmp_path: Path):
    command = [sys.executable, "-m", "landmark.data.code_ranks", str(tmp_path / "out"), str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "absent" in done.stderr
