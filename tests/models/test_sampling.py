"""How tokens are chosen, and what models recommend."""

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from landmark.models.sampling import Chooser, Sampling, decode_loop, lookup_loop
from landmark.utils.errors import UserError


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, {1, 2, 3}),
        ({"top_k": 2}, {2, 3}),
        ({"min_p": 0.5}, {3}),
        ({"top_p": 0.5}, {3}),
        ({"temperature": 0.0}, {3}),
        ({"temperature": 0.0, "repetition_penalty": 100.0}, {2}),
    ],
)
def test_tokens_are_drawn_as_the_settings_say(changes, drawn):
    """The first one is too improbable to be drawn. Token 3 was in the text."""
    logits = torch.tensor([-40.0, 0.5, 1.0, 2.0])
    choose = Chooser(Sampling(**{"temperature": 1.0, **changes}), [3])
    assert {Chooser(choose._sampling, [3], number)(logits) for number in range(200)} == drawn


def test_a_models_recommendations_are_read_as_transformers_reads_them():
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    assert Sampling.from_config(config) == Sampling(0.6, 50, 0.9, 0.0, 1.1)
    assert Sampling.from_config(config, temperature=0, top_k=0, seed=3) == Sampling(0, 0, 0.9, 0.0, 1.1, 3)
    config.do_sample = False
    assert Sampling.from_config(config) == Sampling(repetition_penalty=1.1)
    assert Sampling.from_config(None, top_p=None) == Sampling()


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.001, "repetition_penalty": 0.01}])
def test_logits_that_give_no_distribution_are_refused_and_extreme_settings_give_one(settings):
    choose = Chooser(Sampling(**settings), [1])
    for broken in (torch.nan, torch.inf):
        with pytest.raises(UserError, match="not finite, so no token can be chosen .temperature="):
            choose(torch.tensor([0.0, broken, 1.0]))
    assert choose(torch.tensor([-3e4, 3e4, -3e4])) == 1
    with pytest.raises(UserError, match="generate.repetition_penalty=1e-300: must be at least 0.01"):
        Sampling(repetition_penalty=1e-300)


def test_a_penalty_is_that_of_transformers_also_for_tokens_of_the_answer():
    """By its own processor, greedily: each step without the tokens that came before."""
    logits, penalise = torch.randn(1, 12), RepetitionPenaltyLogitsProcessor(1.7)
    text, steps = [3, 5], decode_loop(logits, lambda _: logits, [Chooser(Sampling(repetition_penalty=1.7), [3, 5])], 9)
    for (token,) in steps:
        assert token == int(penalise(torch.tensor([text]), logits).argmax())
        text.append(token)


class Rule:
    """A text whose next token follows from its last two, and the cache that reads it."""

    def __init__(self, following, text):
        self.following, self.read_so_far, self.wrong = following, list(text[:-1]), 0
        self.first = self.read(torch.tensor([text[-1:]]))

    def read(self, tokens):
        found = []
        for token in tokens[0].tolist():
            self.read_so_far.append(token)
            found.append(self.following[tuple(self.read_so_far[-2:])])
        return torch.nn.functional.one_hot(torch.tensor(found), 3).float()

    def takes_guesses(self, tokens):
        return len(self.read_so_far) + tokens < 40

    def forget(self, tokens):
        self.wrong += tokens
        del self.read_so_far[len(self.read_so_far) - tokens :]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=9, max_size=9), st.lists(st.integers(0, 1), min_size=2, max_size=30), st.data()
)
def test_guessed_tokens_are_those_that_are_chosen_one_by_one(table, text, data):
    """Also the memory behind them, and where a caller wants no more: it has read all but the answer's last token."""
    following = {(a, b): table[3 * a + b] for a in range(3) for b in range(3)}
    most, ends = data.draw(st.integers(1, 30)), {2} if data.draw(st.booleans()) else set()
    plain, rule = Rule(following, text), Rule(following, text)
    choose = Chooser(Sampling(), text)
    expected = list(decode_loop(plain.first, plain.read, [choose], most, ends))
    wanted = data.draw(st.integers(1, most))
    steps, found = lookup_loop(rule.first, rule.read, rule, choose, text, most, ends), []
    for step in steps:
        found.append(step)
        if len(found) == wanted:
            steps.close()
    assert found == expected[:wanted]
    assert rule.read_so_far == [*text, *(token for (token,) in found)][: -1 if len(found) in (most, wanted) else None]


def test_a_text_is_guessed_to_go_on_as_it_did_last():
    rule = Rule({(a, b): (a + b) % 3 for a in range(3) for b in range(3)}, text := [0, 1, 2, 1, 1, 0, 1, 1, 2, 0, 1, 1])
    steps = lookup_loop(rule.first, rule.read, rule, Chooser(Sampling(), text), text, 12)
    assert [token for (token,) in steps] == [2, 0, 2, 2, 1, 0, 1, 1, 2, 0, 2, 2]
    assert 0 < rule.wrong < 12  # some guesses were right, some wrong
    assert not list(lookup_loop(rule.first, rule.read, rule, Chooser(Sampling(), text), text, 0))
