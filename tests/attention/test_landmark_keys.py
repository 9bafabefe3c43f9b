"""Landmark keys with the mean of their block: the scores that they give, in windows cut anywhere and in memory."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from landmark.attention.landmark_keys import BlockMeans, add_means
from tests import naive


@given(
    length=st.integers(1, 25),
    block_size=st.integers(1, 6),
    phases=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    backend=st.sampled_from(["reference", "blockwise"]),
)
@settings(max_examples=60, deadline=None)
def test_attention_in_windows_equals_plain_loops(length, block_size, phases, backend):
    """Short first blocks, empty ones, incomplete last ones."""
    phase = torch.tensor([min(each, block_size) for each in phases])
    q, k, v = (torch.randn(len(phase), 2, length, 4, dtype=torch.float64) for _ in range(3))
    with_means = BlockMeans.of_window(phase, length, block_size, k).add_to(k)
    out = landmark_attention(q, with_means, v, block_size=block_size, phase=phase, backend=backend)
    for b in range(len(phase)):
        for h in range(2):
            q_bh, k_bh, v_bh = (x[b, h].numpy() for x in (q, k, v))
            expected = naive.landmark_attention(q_bh, k_bh, v_bh, block_size, int(phase[b]), means=True)
            np.testing.assert_allclose(out[b, h], expected, atol=1e-10)


def test_complete_blocks_are_those_of_a_window():
    k = torch.randn(2, 3, 4 * 6, 8, dtype=torch.float64)
    of_window = BlockMeans.of_window(torch.zeros(2, dtype=torch.int64), 24, 5, k).add_to(k)
    torch.testing.assert_close(add_means(k.unflatten(2, (-1, 6))).flatten(2, 3), of_window)


def test_a_score_is_the_mean_score_of_the_block_and_the_landmarks_own():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    scores = k @ q
    torch.testing.assert_close(add_means(k)[-1] @ q, scores[:-1].mean() + scores[-1])


def test_means_carry_gradients_to_every_token_of_the_block():
    k = torch.randn(1, 1, 6, 2, requires_grad=True)
    BlockMeans.of_window(torch.tensor([1]), 6, 3, k).add_to(k)[0, 0, 2, 0].backward()
    assert k.grad[0, 0, :, 0].tolist() == [0.5, 0.5, 1, 0, 0, 0]
