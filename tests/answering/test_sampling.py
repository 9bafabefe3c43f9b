"""How tokens are chosen, and what models recommend."""

import pytest
import torch

from landmark.answering.sampling import Chooser, Sampling


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
