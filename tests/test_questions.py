"""The questions with which sources and answers are measured: whole, balanced, and each passage once in its book."""

from collections import Counter
from pathlib import Path

import pytest

from landmark.utils.files import read_json
from tests.experiment.data.conftest import SHARED

CONTENT = read_json(Path(__file__).parents[1] / "experiments" / "sources" / "questions.json")


def test_they_are_whole_and_balanced():
    """Half in words other than the text's, a third held out, of both kinds."""
    questions = CONTENT["questions"]
    assert Counter(each["book"] for each in questions) == dict.fromkeys(CONTENT["books"], 10)
    assert Counter((each["words"], each["held_out"]) for each in questions) == {
        (words, held_out): 10 if held_out else 20 for words in ("text", "own") for held_out in (False, True)
    }
    assert len({each["question"] for each in questions}) == len(CONTENT["books"]) * 10
    for each in questions:
        assert each["question"].endswith("?")
        assert 0 < len(each["answer"].split()) <= 8
        assert 3 < len(each["gold"].split()) <= 40


@pytest.mark.parametrize("book", CONTENT["books"])
def test_each_passage_stands_once_in_its_book(book):
    if not (file := SHARED / CONTENT["books"][book]["file"]).is_file():
        pytest.skip(f"{file.name} is not in ../shared/data")
    text = file.read_text("utf-8")
    assert [
        each["question"] for each in CONTENT["questions"] if each["book"] == book and text.count(each["gold"]) != 1
    ] == []
