import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from landmark.attention.layout import blocks_and_landmarks
from landmark.data.windows import PositionalJumps


def positions(jumps: PositionalJumps, indices: range, phase: int = 0, seed: int = 0, step: int = 0) -> torch.Tensor:
    return jumps.positions(torch.full((len(indices),), phase), seed, step, indices)


@pytest.mark.parametrize("phase", [0, 3, 7])
def test_positions_jump_after_landmarks_only(phase):
    found = positions(PositionalJumps(40, 7, p_jump=9), range(50), phase)
    assert found[:, 0].eq(0).all()
    steps = found.diff(dim=1)
    _, is_landmark = blocks_and_landmarks(torch.full((50,), phase), 40, 7)
    after = is_landmark[:, :-1]
    assert steps[~after].eq(1).all()
    assert set(steps[after].tolist()) == set(range(1, 10))


def test_a_jump_is_uniform():
    found = positions(PositionalJumps(12, 5, p_jump=4), range(8000))
    counts = torch.bincount(found[:, 6] - found[:, 5], minlength=5)
    assert counts[0] == 0
    assert counts[1:].min() > 1850
    assert counts[1:].max() < 2150


@given(st.integers(0, 2**32), st.integers(0, 2**40), st.integers(0, 8), st.integers(0, 8))
def test_they_depend_on_seed_step_and_index_only(seed: int, step: int, first: int, last: int):
    jumps, indices = PositionalJumps(30, 7, p_jump=50), range(first, max(first, last))
    whole = positions(jumps, range(8), seed=seed, step=step)
    part = positions(jumps, indices, seed=seed, step=step)
    assert torch.equal(part, whole[indices.start : indices.stop])


def test_seeds_and_steps_differ():
    jumps = PositionalJumps(400, 7, p_jump=2)
    each = [positions(jumps, range(4), seed=seed, step=step) for seed in (0, 1) for step in (0, 1)]
    assert all(not torch.equal(each[i], each[j]) for i in range(4) for j in range(i))
