"""The questions with which sources and answers are measured: whole, balanced, and each passage once in its book."""

from collections import Counter
from pathlib import Path

import pytest

from landmark.utils.files import read_json
from tests.experiment.data.conftest import SHARED

SOURCES = Path(__file__).parents[1] / "experiments" / "sources"
CONTENT, OTHERS = (read_json(SOURCES / name) for name in ("questions.json", "other_books.json"))


@pytest.mark.parametrize("content", [CONTENT, OTHERS])
def test_they_are_whole_and_balanced(content):
    """Half in words other than the text's; a third held out, of both kinds, and all about other books."""
    questions, held_out = content["questions"], 10 if content is CONTENT else 30
    assert Counter(each["book"] for each in questions) == dict.fromkeys(content["books"], 10)
    assert Counter((each["words"], each["held_out"]) for each in questions) == Counter(
        {
            (words, is_out): held_out if is_out else 30 - held_out
            for words in ("text", "own")
            for is_out in (False, True)
        }
    )
    assert len({each["question"] for each in questions}) == 60
    assert not {*CONTENT["books"]} & {*OTHERS["books"]}
    for each in questions:
        assert each["question"].endswith("?")
        assert 0 < len(each["answer"].split()) <= 8
        assert 3 < len(each["gold"].split()) <= 40


@pytest.mark.parametrize("book", [*CONTENT["books"], *OTHERS["books"]])
def test_each_passage_stands_once_in_its_book(book):
    content = CONTENT if book in CONTENT["books"] else OTHERS
    if not (file := SHARED / content["books"][book]["file"]).is_file():
        pytest.skip(f"{file.name} is not in ../shared/data")
    text, questions = file.read_text("utf-8"), [each for each in content["questions"] if each["book"] == book]
    assert [each["question"] for each in questions if text.count(each["gold"]) != 1] == []
