import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from landmark.data.windows import ControlledLandmarks


def test_half_of_the_landmarks_are_controlled_differently_in_each_layer():
    controlled = ControlledLandmarks(layers=3, blocks=6).of_step(0, 0, range(2000))
    assert controlled.shape == (2000, 3, 6)
    assert (controlled.double().mean((0,)) - 0.5).abs().max() < 0.05
    agree = (controlled[:, 0] == controlled[:, 1]).double().mean()
    assert abs(agree - 0.5) < 0.05


@given(st.integers(0, 2**32), st.integers(0, 2**40), st.integers(0, 8), st.integers(0, 8))
def test_they_depend_on_seed_step_and_index_only(seed: int, step: int, first: int, last: int):
    controlled, indices = ControlledLandmarks(2, 5), range(first, max(first, last))
    whole = controlled.of_step(seed, step, range(8))
    assert torch.equal(controlled.of_step(seed, step, indices), whole[indices.start : indices.stop])


def test_seeds_and_steps_differ():
    controlled = ControlledLandmarks(1, 60)
    each = [controlled.of_step(seed, step, range(4)) for seed in (0, 1) for step in (0, 1)]
    assert all(not torch.equal(each[i], each[j]) for i in range(4) for j in range(i))


def test_validation_is_the_same_each_time_and_for_each_share():
    controlled = ControlledLandmarks(2, 6)
    numbers = np.array([5, 900, 17])
    whole = controlled.of_validation(numbers)
    assert torch.equal(torch.cat([controlled.of_validation(numbers[i : i + 1]) for i in range(3)]), whole)
    assert not torch.equal(whole[0], whole[1])
