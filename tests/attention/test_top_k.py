"""Attention to the best few blocks of a window: against plain loops, finite differences, and a memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from landmark.memory import Memory
from tests import naive


@given(
    length=st.integers(1, 30),
    block_size=st.integers(1, 5),
    phases=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    top_k=st.integers(1, 6),
    backend=st.sampled_from(["reference", "blockwise"]),
    has_cmt=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_output_equals_plain_loops(length, block_size, phases, top_k, backend, has_cmt):
    """With a context miss token the best blocks are chosen among free and controlled ones."""
    phase = torch.tensor([min(each, block_size) for each in phases])
    q, k, v = (torch.randn(len(phase), 2, length, 4, dtype=torch.float64) for _ in range(3))
    cmt, controlled = torch.randn(2, 4, dtype=torch.float64), torch.rand(len(phase), 40) < 0.5
    token = {"cmt": cmt, "controlled": controlled} if has_cmt else {}
    out = landmark_attention(q, k, v, block_size=block_size, phase=phase, top_k=top_k, backend=backend, **token)
    for b in range(len(phase)):
        for h in range(2):
            q_bh, k_bh, v_bh = (x[b, h].numpy() for x in (q, k, v))
            token = {"cmt": cmt[h].numpy(), "controlled": controlled[b].numpy()} if has_cmt else {}
            expected = naive.landmark_attention(q_bh, k_bh, v_bh, block_size, int(phase[b]), top_k=top_k, **token)
            np.testing.assert_allclose(out[b, h], expected, atol=1e-10)


@given(
    length=st.integers(1, 40),
    block_size=st.integers(1, 5),
    phases=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    top_k=st.integers(1, 4),
    local_blocks=st.integers(0, 2),
    backend=st.sampled_from(["reference", "blockwise"]),
)
@settings(max_examples=120, deadline=None)
def test_other_blocks_are_read_by_the_values_of_their_landmarks(
    length, block_size, phases, top_k, local_blocks, backend
):
    phase = torch.tensor([min(each, block_size) for each in phases])
    q, k, v = (torch.randn(len(phase), 1, length, 4, dtype=torch.float64) for _ in range(3))
    options = {"top_k": top_k, "local_blocks": local_blocks, "landmark_values": True}
    out = landmark_attention(q, k, v, block_size=block_size, phase=phase, backend=backend, **options)
    for b in range(len(phase)):
        q_b, k_b, v_b = (x[b, 0].numpy() for x in (q, k, v))
        expected = naive.landmark_attention(q_b, k_b, v_b, block_size, int(phase[b]), **options)
        np.testing.assert_allclose(out[b, 0], expected, atol=1e-10)


@pytest.mark.parametrize("landmark_values", [False, True])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_gradients_are_those_of_finite_differences(backend, landmark_values):
    """Blocks that are not chosen get none, unless their landmarks are read."""
    leaves = [torch.randn(1, 1, 14, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    settings = {"block_size": 2, "phase": torch.tensor([0]), "top_k": 2, "backend": backend}
    settings["landmark_values"] = landmark_values
    assert torch.autograd.gradcheck(lambda *x: landmark_attention(*x, **settings), leaves)
    landmark_attention(*leaves, **settings)[:, :, -1].sum().backward()
    read = leaves[2].grad.abs().sum(-1)[0, 0] > 0
    blocks = 2 * 2 + 2  # two blocks and the query's own
    assert int(read.sum()) == blocks + 2 if landmark_values else int(read.sum()) <= blocks


def test_all_blocks_are_the_default():
    q, k, v = torch.randn(3, 2, 2, 40, 8, dtype=torch.float64)
    torch.testing.assert_close(
        landmark_attention(q, k, v, block_size=3, top_k=10), landmark_attention(q, k, v, block_size=3)
    )


def test_landmark_values_are_not_read_where_no_block_is_left_out():
    q, k, v = torch.randn(3, 2, 2, 40, 8, dtype=torch.float64)
    for top_k in (None, 10):
        read = landmark_attention(q, k, v, block_size=3, top_k=top_k, landmark_values=True)
        torch.testing.assert_close(read, landmark_attention(q, k, v, block_size=3))
    with pytest.raises(ValueError, match="landmark_values: leave out"):
        landmark_attention(q, k, v, block_size=3, top_k=1, landmark_values=True, cmt=k[0, :, 0])


def test_a_query_reads_as_from_a_memory():
    """The first query after some complete blocks finds them all in a memory. No channel turns."""
    q, k, v = torch.randn(3, 1, 2, 25, 8, dtype=torch.float64)
    memory = Memory(3, k=2, mapping="true", rope_base=torch.zeros(4))
    memory.attend(1, q[:, :, :24], k[:, :, :24], v[:, :, :24])
    memory.commit()
    read = memory.attend(1, q[:, :, 24:], k[:, :, 24:], v[:, :, 24:])
    torch.testing.assert_close(read, landmark_attention(q, k, v, block_size=3, top_k=2)[:, :, 24:])


@pytest.mark.parametrize("setting", [{"top_k": 0}, {"backend": "triton"}])
def test_what_it_cannot_do_is_refused(setting):
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    with pytest.raises(ValueError, match="top_k="):
        landmark_attention(q, k, v, block_size=2, **{"top_k": 1, **setting})
