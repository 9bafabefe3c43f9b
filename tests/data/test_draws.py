from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from landmark.attention.layout import blocks_and_landmarks
from landmark.data.draws import Draws
from landmark.data.windows import Batch


def batch(size: int, length: int = 40, phase: int = 0) -> Batch:
    tokens = torch.zeros(size, length, dtype=torch.int64)
    return Batch(tokens, tokens, torch.full((size,), phase))


def test_without_a_token_or_jumps_nothing_is_drawn():
    drawn = Draws(40, 7).train(batch(3), 0, 0, range(3))
    assert drawn.controlled is None
    assert drawn.positions is None
    assert Draws(40, 7, p_jump=9).validate(batch(3), [1, 2, 3]).positions is None, "jumps are for training"


@pytest.mark.parametrize("phase", [0, 3, 7])
def test_positions_jump_after_landmarks_only(phase):
    positions = Draws(40, 7, p_jump=9).train(batch(50, phase=phase), 0, 0, range(50)).positions
    assert positions is not None
    assert positions[:, 0].eq(0).all()
    steps = positions.diff(dim=1)
    _, is_landmark = blocks_and_landmarks(torch.full((50,), phase), 40, 7)
    after = is_landmark[:, :-1]
    assert steps[~after].eq(1).all()
    assert set(steps[after].tolist()) == set(range(1, 10))


def test_a_jump_is_uniform():
    positions = Draws(12, 5, p_jump=4).train(batch(8000, 12), 0, 0, range(8000)).positions
    assert positions is not None
    counts = torch.bincount(positions[:, 6] - positions[:, 5], minlength=5)
    assert counts[0] == 0
    assert counts[1:].min() > 1850
    assert counts[1:].max() < 2150


def test_half_of_the_landmarks_are_controlled_differently_in_each_layer():
    controlled = Draws(40, 7, cmt_layers=3).train(batch(2000), 0, 0, range(2000)).controlled
    assert controlled is not None
    assert controlled.shape == (2000, 3, 6)
    assert (controlled.double().mean((0,)) - 0.5).abs().max() < 0.05
    agree = (controlled[:, 0] == controlled[:, 1]).double().mean()
    assert abs(agree - 0.5) < 0.05


@given(st.integers(0, 2**32), st.integers(0, 2**40), st.integers(0, 8), st.integers(0, 8))
def test_draws_depend_on_seed_step_and_index_only(seed: int, step: int, first: int, last: int):
    draws, indices = Draws(30, 7, cmt_layers=2, p_jump=50), range(first, max(first, last))
    whole = draws.train(batch(8, 30), seed, step, range(8))
    part = draws.train(batch(len(indices), 30), seed, step, indices)
    for ours, theirs in ((part.controlled, whole.controlled), (part.positions, whole.positions)):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs[indices.start : indices.stop])


def test_seeds_steps_and_kinds_of_draws_differ():
    draws = Draws(400, 7, cmt_layers=1, p_jump=2)
    drawn = [draws.train(batch(4, 400), seed, step, range(4)) for seed in (0, 1) for step in (0, 1)]
    for kind in ("controlled", "positions"):
        each = [getattr(one, kind) for one in drawn]
        assert all(not torch.equal(each[i], each[j]) for i in range(4) for j in range(i))


def test_validation_is_the_same_each_time_and_for_each_share():
    draws = Draws(40, 7, cmt_layers=2)
    numbers = np.array([5, 900, 17])
    whole = draws.validate(batch(3), numbers).controlled
    shares = [draws.validate(batch(1), numbers[i : i + 1]).controlled for i in range(3)]
    assert whole is not None
    assert torch.equal(torch.cat([share for share in shares if share is not None]), whole)
    assert not torch.equal(whole[0], whole[1])


def test_a_batch_takes_its_draws_along():
    drawn = Draws(40, 7, cmt_layers=2, p_jump=3).train(batch(4), 0, 0, range(4))
    part = drawn.rows(slice(1, 3)).to("cpu")
    assert drawn.controlled is not None
    assert drawn.positions is not None
    assert part.controlled is not None
    assert part.positions is not None
    assert torch.equal(part.controlled, drawn.controlled[1:3])
    assert torch.equal(part.positions, drawn.positions[1:3])
    assert part.weights is None
    assert replace(part, weights=torch.ones(2, 40)).rows(slice(0, 1)).weights is not None
