"""Landmark keys with a summary of their block: the scores that they give, in windows cut anywhere and in memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from landmark.attention.landmark_keys import WindowBlocks, add_summaries, bias_landmarks, block_weights
from tests import naive


def add(kind, blocks, q, k):
    return blocks.add_means(k) if kind == "mean" else blocks.add_pooled(q, k)


@given(
    length=st.integers(1, 25),
    block_size=st.integers(1, 6),
    phases=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    backend=st.sampled_from(["reference", "blockwise"]),
    kind=st.sampled_from(["mean", "pooled"]),
)
@settings(max_examples=100, deadline=None)
def test_attention_in_windows_equals_plain_loops(length, block_size, phases, backend, kind):
    """Short first blocks, empty ones, incomplete last ones."""
    phase = torch.tensor([min(each, block_size) for each in phases])
    q, k, v = (torch.randn(len(phase), 2, length, 4, dtype=torch.float64) for _ in range(3))
    summarised = add(kind, WindowBlocks.of(phase, length, block_size, k), q, k)
    out = landmark_attention(q, summarised, v, block_size=block_size, phase=phase, backend=backend)
    for b in range(len(phase)):
        for h in range(2):
            q_bh, k_bh, v_bh = (x[b, h].numpy() for x in (q, k, v))
            expected = naive.landmark_attention(q_bh, k_bh, v_bh, block_size, int(phase[b]), landmark_key=kind)
            np.testing.assert_allclose(out[b, h], expected, atol=1e-10)


@pytest.mark.parametrize("kind", ["mean", "pooled"])
def test_complete_blocks_are_those_of_a_window(kind):
    """With grouped heads: the mean query of a group pools."""
    q, k = torch.randn(2, 6, 4 * 6, 8, dtype=torch.float64), torch.randn(2, 3, 4 * 6, 8, dtype=torch.float64)
    of_window = add(kind, WindowBlocks.of(torch.zeros(2, dtype=torch.int64), 24, 5, k), q, k)
    blocks = k.unflatten(2, (-1, 6))
    weights = block_weights(q[:, :, 5::6], blocks) if kind == "pooled" else None
    torch.testing.assert_close(add_summaries(blocks, weights).flatten(2, 3), of_window)


def test_a_score_is_the_mean_score_of_the_block_and_the_landmarks_own():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    scores = k @ q
    torch.testing.assert_close(add_summaries(k)[-1] @ q, scores[:-1].mean() + scores[-1])


def test_a_pooled_score_is_at_most_the_log_sum_exp_of_the_block_and_reaches_it():
    """Reaches it for the landmark's own query, where the landmark's own key is zero: then its gate is exact."""
    q, k = torch.randn(1, 1, 6, 16, dtype=torch.float64), torch.randn(1, 1, 6, 16, dtype=torch.float64)
    k[:, :, -1] = 0
    q, k = bias_landmarks(3 * q, k, torch.arange(6)[None] == 5, torch.zeros(1, dtype=torch.float64))
    gates = (q @ WindowBlocks.of(torch.tensor([0]), 6, 5, k).add_pooled(q, k)[:, :, -1:].mT)[0, 0, :, 0] / 4
    exact = (q @ k[:, :, :5].mT / 4).logsumexp(-1)[0, 0]
    torch.testing.assert_close(gates[-1], exact[-1])
    assert (gates[:-1] < exact[:-1]).all()
    assert gates.abs().max() > 0.1 + math.log(5)


@pytest.mark.parametrize(("phase", "length"), [(1, 6), (3, 5), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_pooled_keys(phase, length, dtype):
    """Of short, empty and incomplete blocks: finite, and in float64 those of finite differences."""
    q, k = (torch.randn(1, 1, length, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    blocks = WindowBlocks.of(torch.tensor([phase]), length, 3, k)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(blocks.add_pooled, (q, k))
    else:
        blocks.add_pooled(q, k).sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k))


def test_means_carry_gradients_to_every_token_of_the_block():
    k = torch.randn(1, 1, 6, 2, requires_grad=True)
    WindowBlocks.of(torch.tensor([1]), 6, 3, k).add_means(k)[0, 0, 2, 0].backward()
    assert k.grad[0, 0, :, 0].tolist() == [0.5, 0.5, 1, 0, 0, 0]
