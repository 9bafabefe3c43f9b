"""The benchmark of answers: what is right, where a name is asked for, and that a shared memory changes no answer."""

import random

import pytest

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")
pytest.importorskip("bm25s", reason="the optional extra `documents` is not installed")

from benchmarks import answers
from benchmarks.sources import needle
from landmark.experiment.data.tokenizers import PretrainedTokenizer
from landmark.models.huggingface import wrap
from landmark.reading.answering import Answering
from tests.models.huggingface.conftest import make_model, make_tokenizer

NAMES = ["Anna", "Berta", "Clara", "Dora", "Emil", "Fritz", "Gustav", "Hanna", "Ida", "Karl"]


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("It was the Delaware tribe, and the Shawanoes.", "the Shawanoes and the Delawares", True),
        ("The Delawares.", "the Shawanoes and the Delawares", False),
        ("For 15 years.", "fifteen", True),
        ("For fifty years.", "fifteen", False),
        ("", "coffee", False),
    ],
)
def test_an_answer_is_right_with_all_words_of_the_right_one(answer, gold, right):
    assert answers.is_right(answer, gold) is right


def test_names_are_asked_for_where_the_text_before_does_not_say_them():
    read = "Then came " + ", and ".join(NAMES * 2) + ". "
    lines = [f"{'They waited by the water for the whole day ' * 8}and saw {name} there. " for name in NAMES * 3]
    chats = Answering(wrap(make_model("llama"), make_tokenizer(), landmarks="none"), make_tokenizer()).chats
    names, places = answers.cloze(chats, read + "".join(lines), read, random.Random(0))
    assert sorted(names) == sorted({name[0]: name for name in NAMES}.values())[: len(names)]
    assert len(places) == 2 * len(names)
    assert all(name not in before and len(before) > 250 for before, name in places)


def test_every_way_answers_as_a_model_that_has_read_its_text_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "PASSAGE", 64)
    monkeypatch.setattr(answers, "LAST", 100)
    monkeypatch.setattr(answers, "WAYS", {way: {"window": 8, **of} for way, of in answers.WAYS.items()})
    model = wrap(make_model("llama"), make_tokenizer(), block_size=8, landmarks="none", memory={"dense": 0})
    text = "".join(f"Line {number} is about herons and {number * 7} crows. " for number in range(20))
    questions = {number: {"question": f"What is line {number} about?", "gold": text[:20]} for number in (3, 12)}
    asked = answers.Asked(Answering(model, make_tokenizer()), text, questions, 0, tmp_path)
    for group in ["blocks_128"], ["all_keys"], ["last_tokens"], [*answers.SEARCH]:
        asked.answers(group)
        for way in group:
            alone = {
                item: asked.said(asked.text(way, item), item, model.new_memory(**answers.WAYS[way]))
                for item in asked.items
            }
            assert asked.found(way) == alone
    rows = [
        answers.Asked(asked.answering, text, questions, 0, tmp_path).timed(way) for way in ("own_cache", "blocks_128")
    ]
    sizes = [int(row.split(" | ")[-1].strip(" |")) for row in rows]
    assert [row.split(" | ")[0] for row in rows] == ["| own_cache", "| blocks_128"]
    assert sizes[1] <= 2 * sizes[0] + 2
    assert asked.text("sources_6", "12") != asked.text("sources_6", "3")
    assert len(asked.text("bm25_4", "12")) == 4 * 64
    assert " 12 is about" in asked.chats.decode(asked.text("bm25_1", "12"))


@pytest.mark.parametrize("task", ["passkey", "niah_single_2", "niah_multikey_1"])
def test_a_needle_stands_once_before_its_question(task):
    text, question = needle(task, 2500, 1, "The heron waits by the lake. " * 400, PretrainedTokenizer(make_tokenizer()))
    assert text.count(question["gold"]) == 1
    assert question["question"].startswith("What")
    assert question["question"][:60] not in text
    assert 2000 < len(text) < 2500
