"""Local blocks, both directions, and a cap of the scores: against plain loops and finite differences."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from tests import naive

BACKENDS = ["reference", "blockwise"]


@given(
    length=st.integers(1, 60),
    block_size=st.integers(1, 12),
    phases=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    prefix=st.integers(0, 20),
    top_k=st.one_of(st.none(), st.integers(1, 4)),
    local_blocks=st.integers(0, 4),
    bidirectional=st.booleans(),
    sinks=st.booleans(),
    softcap=st.one_of(st.none(), st.floats(0.2, 3)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_output_equals_plain_loops(
    length, block_size, phases, prefix, top_k, local_blocks, bidirectional, sinks, softcap, seed
):
    """Windows cut anywhere, of different phases, that end before a landmark or on one; empty first blocks."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.tensor([min(each, block_size) for each in phases])
    prefix = 0 if bidirectional else prefix

    def draw(tokens):
        return torch.randn(len(phase), 2, tokens, 4, dtype=torch.float64, generator=generator)

    q, k, v = draw(length), draw(prefix + length), draw(prefix + length)
    options: dict[str, Any] = {"top_k": top_k, "local_blocks": local_blocks, "bidirectional": bidirectional}
    options["softcap"] = softcap
    token: dict[str, Any] = {"sinks": torch.zeros(2, dtype=torch.float64)} if sinks else {}
    loops: dict[str, Any] = {"cmt": np.zeros(4), "controlled": np.zeros(80, bool)} if sinks else {}
    for backend in BACKENDS:
        out = landmark_attention(
            q, k, v, block_size=block_size, phase=phase, prefix=prefix, backend=backend, **options, **token
        )
        for b in range(len(phase)):
            for h in range(2):
                q_bh, k_bh, v_bh = (x[b, h].numpy() for x in (q, k, v))
                expected = naive.landmark_attention(
                    q_bh, k_bh, v_bh, block_size, int(phase[b]), prefix, **options, **loops
                )
                np.testing.assert_allclose(out[b, h], expected, atol=1e-10)


@given(
    length=st.integers(1, 50),
    block_size=st.integers(1, 9),
    phases=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    top_k=st.one_of(st.none(), st.integers(1, 4)),
    local_blocks=st.integers(0, 3),
    bidirectional=st.booleans(),
    softcap=st.one_of(st.none(), st.floats(0.2, 3)),
)
@settings(max_examples=80, deadline=None)
def test_gradients_of_tiles_are_those_of_explicit_weights(
    length, block_size, phases, top_k, local_blocks, bidirectional, softcap
):
    phase = torch.tensor([min(each, block_size) for each in phases])
    leaves = torch.randn(3, len(phase), 2, length, 4, dtype=torch.float64)
    upstream = torch.randn(len(phase), 2, length, 4, dtype=torch.float64)
    found = []
    for backend in BACKENDS:
        q, k, v = leaves.clone().requires_grad_().unbind(0)
        options: dict[str, Any] = {"top_k": top_k, "local_blocks": local_blocks, "bidirectional": bidirectional}
        options["softcap"] = softcap
        out, lse = landmark_attention(
            q, k, v, block_size=block_size, phase=phase, backend=backend, return_lse=True, **options
        )
        finite = lse.masked_fill(lse.isinf(), 0.0)  # that of the landmark of an empty first block is not
        found.append([out, lse, *torch.autograd.grad((out * upstream).sum() + finite.sum(), (q, k, v))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{"local_blocks": 1}, {"bidirectional": True}, {"bidirectional": True, "top_k": 2}, {"softcap": 0.7}]
)
def test_gradients_are_those_of_finite_differences(backend, options):
    leaves = [torch.randn(1, 1, 14, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    settings = {"block_size": 2, "phase": torch.tensor([1]), "backend": backend, **options}
    assert torch.autograd.gradcheck(lambda *x: landmark_attention(*x, **settings), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_window_of_all_blocks_is_attention_to_all_normal_tokens(backend, bidirectional):
    q, k, v = torch.randn(3, 2, 2, 41, 8, dtype=torch.float64)
    options = {"local_blocks": 9, "bidirectional": bidirectional}
    out = landmark_attention(q, k, v, block_size=4, backend=backend, **options)
    normal = torch.arange(41) % 5 != 4
    mask = normal & (torch.ones(41, 41, dtype=torch.bool).tril() | bidirectional)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_directions_are_a_mirror(backend):
    """Blocks in reverse order, tokens of a block and positions left alone: every query gets the same output."""
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64)
    out = landmark_attention(q, k, v, block_size=4, bidirectional=True, backend=backend)
    turned = [x.unflatten(2, (8, 5)).flip(2).flatten(2, 3) for x in (q, k, v, out)]
    found = landmark_attention(*turned[:3], block_size=4, bidirectional=True, backend=backend)
    torch.testing.assert_close(found, turned[3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_do_not_see_each_other(backend):
    q, k, v = torch.randn(3, 1, 2, 50, 8, dtype=torch.float64)
    bounds, phase = torch.tensor([0, 13, 13, 31, 50]), torch.tensor([0, 2, 4, 1])
    options = {"block_size": 4, "bidirectional": True, "local_blocks": 1, "backend": backend}
    out = landmark_attention(q, k, v, phase=phase, cu_seqlens=bounds, **options)
    for n, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
        part = [x[:, :, start:end] for x in (q, k, v)]
        torch.testing.assert_close(out[:, :, start:end], landmark_attention(*part, phase=phase[n : n + 1], **options))


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_blocks": -1},
        {"local_blocks": 1, "backend": "triton"},
        {"bidirectional": True, "backend": "triton"},
        {"bidirectional": True, "prefix": 3},
        {"bidirectional": True, "cmt": torch.zeros(1, 4)},
        {"softcap": 0.0},
        {"softcap": 1.0, "backend": "triton"},
        {"softcap": 1.0, "cmt": torch.zeros(1, 4)},
        {"softcap": 1.0, "gates": torch.zeros(1, 1, 6, 2)},
    ],
)
def test_what_it_cannot_do_is_refused(wrong):
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    with pytest.raises(ValueError, match="local_blocks=|bidirectional=|softcap="):
        landmark_attention(q[:, :, wrong.get("prefix", 0) :], k, v, block_size=2, **wrong)
