"""How far an answer is in its passages: what it is made of, and that it changes nothing of the answer."""

import pytest

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

import torch

from landmark.models.huggingface import wrap
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering
from landmark.reading.sources import Found
from landmark.reading.support import SAID, support, support_of
from tests.models.huggingface.conftest import make_model, make_tokenizer


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nats_are_those_of_the_model_and_the_answer_is_the_same(family):
    """Behind the text, as the answer is made, and behind the question alone; before temperature and penalties."""
    original = make_model(family)
    answering = Answering(wrap(make_model(family), make_tokenizer(), block_size=16, landmarks="none"), make_tokenizer())
    text, question = answering.ids("The zebra sleeps in Quito. "), answering.ids("Where sleeps the zebra?")
    sampling, answers = Sampling(temperature=0.7, repetition_penalty=1.3, seed=5), []
    for nats in (None, []):
        answers.append(answer := answering.new_answer(text, False))
        answer.nats = nats
        list(answering.answer([*text, *question], answering.model.new_memory(), answer, sampling, 12))
    plain, answer = answers
    assert plain.tokens == answer.tokens
    assert len(answer.tokens) > 4
    for ids, found in (([*text, *question], answer.nats), (question, answering.nats_of(question, answer.tokens))):
        with torch.no_grad():
            logits = original(torch.tensor([[*ids, *answer.tokens]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found[: len(expected)]), expected, rtol=1e-3, atol=1e-3)
    measured = support(answering, Found([], "a text", 9.0), question, answer)
    assert measured == support_of(answer.nats[: len(expected)], found, 9.0)
    assert support(answering, Found([]), question, answer) is None, "nothing was found"


def test_an_answer_that_the_text_adds_nothing_to_is_not_in_it():
    added, same = support_of([-0.1] * 9, [-3.0] * 9, 12.0), support_of([-3.0] * 9, [-3.0] * 9, 2.0)
    assert (added.level, same.level) == ("clear", "none")
    assert 1 >= added.score > same.score >= 0
    assert (added.said, same.said) == (SAID["clear"], SAID["none"])
