"""How tokens are chosen, and what models recommend."""

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from landmark.models.sampling import Chooser, Sampling, decode_loop
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
