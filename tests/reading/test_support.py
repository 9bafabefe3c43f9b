"""How far an answer is in its passages: what it is made of, and that it changes nothing of the answer."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

import pandas as pd
import torch

from landmark.models.huggingface import wrap
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering
from landmark.reading.sources import Found
from landmark.reading.support import SAID, TOKENS, own_words, support, support_of
from tests.models.huggingface.conftest import make_model, make_tokenizer

SOURCES = Path(__file__).parents[2] / "experiments" / "sources"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nats_are_those_of_the_model_and_the_answer_is_the_same(family):
    """As the answer is made: before temperature and penalties."""
    original = make_model(family)
    answering = Answering(wrap(make_model(family), make_tokenizer(), block_size=16, landmarks="none"), make_tokenizer())
    ids = answering.ids("The zebra sleeps in Quito. Where sleeps the zebra?")
    sampling, answers = Sampling(temperature=0.7, repetition_penalty=1.3, seed=5), []
    for nats in (None, []):
        answers.append(answer := answering.new_answer(ids, False))
        answer.nats = nats
        for _ in answering.answer(ids, answering.model.new_memory(), answer, sampling, TOKENS + 6):
            pass
    plain, answer = answers
    assert plain.tokens == answer.tokens
    with torch.no_grad():
        logits = original(torch.tensor([[*ids, *answer.tokens]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.nats[: len(expected)]), expected, rtol=1e-3, atol=1e-3)
    found = Found([], "The zebra sleeps in Quito.", "Where sleeps the zebra?", 9.0)
    own = own_words(answer.decode(answer.tokens[:TOKENS]), found.question, found.text)
    assert support(found, answer) == support_of(min(answer.nats[:TOKENS]), own, 9.0)
    assert support(Found([]), answer) is None, "nothing was found"
    assert support(found, plain) is None


def test_an_answer_in_words_of_the_passages_that_the_model_is_sure_of_is_in_the_text():
    passages = "The landlord is Osgood Fenwick. The rent is ten pounds."
    assert own_words("The landlord is Osgood Fenwick.", "Who is the landlord?", passages) == 1
    assert own_words("The landlords are Mira and Osgood.", "Who is the landlord?", passages) == 0.5
    assert own_words("The landlord is the landlord.", "Who is the landlord?", passages) == 0
    sure, unsure = support_of(-0.1, 1, 15), support_of(-4.0, 0, 2)
    assert (sure.level, unsure.level) == ("clear", "none")
    assert 1 >= sure.score > unsure.score >= 0
    assert (sure.said, unsure.said) == (SAID["clear"], SAID["none"])


@pytest.mark.parametrize("file", sorted(SOURCES.glob("results/support-*.csv")), ids=lambda file: file.stem)
def test_the_recorded_answers_have_these_scores(file):
    """So the published curve is that of the measure."""
    rows = pd.read_csv(file)
    assert len(rows) == 120
    for row in rows.itertuples():
        assert support_of(row.least, row.own, row.bm25).score == pytest.approx(row.score, abs=2e-3)


def test_questions_without_an_answer_are_whole_and_balanced():
    content = json.loads((SOURCES / "unanswerable.json").read_text("utf-8"))["questions"]
    kinds = pd.DataFrame(content)
    assert kinds["words"].value_counts().to_dict() == {"text": 20, "own": 20, "other book": 20}
    assert kinds["held_out"].sum() == 20
    assert kinds["question"].nunique() == 60
