"""A hierarchy of landmarks: products of gates along the way, against plain loops, with gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from landmark.attention.hierarchy import Hierarchy, adjust, first_bias, landmark_scores
from tests import naive


@st.composite
def windows(draw):
    block_size = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 2))
    prefix = draw(st.sampled_from([0, 0, 5, 13]))
    return {
        "length": draw(st.integers(1, 40)),
        "prefix": prefix,
        "heads": draw(st.sampled_from([(1, 1), (2, 1)])),
        "block_size": block_size,
        "phase": torch.tensor(draw(st.lists(st.integers(0, block_size), min_size=batch, max_size=batch))),
        "fan_out": draw(st.integers(2, 4)),
        "levels": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 1000)),
    }


def tensors(window):
    generator = torch.Generator().manual_seed(window["seed"])
    (heads, kv_heads), batch = window["heads"], len(window["phase"])

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    keys = window["prefix"] + window["length"]
    q, k, v = draw(batch, heads, window["length"], 4), draw(batch, kv_heads, keys, 4), draw(batch, kv_heads, keys, 4)
    return q, k, v, draw(window["levels"], kv_heads)


def attend(window, q, k, v, bias, **settings):
    common = {"block_size": window["block_size"], "phase": window["phase"], "prefix": window["prefix"]}
    hierarchy = Hierarchy(window["fan_out"], bias)
    return landmark_attention(q, k, v, hierarchy=hierarchy, return_lse=True, **common, **settings)


@given(windows(), st.sampled_from(["reference", "blockwise"]))
@settings(max_examples=25, deadline=None)
def test_output_equals_plain_loops(window, backend):
    """Short first blocks, empty ones, incomplete groups, prefixes, grouped heads."""
    q, k, v, bias = (x.detach() for x in tensors(window))
    out, _ = attend(window, q, k, v, bias, backend=backend)
    group = window["heads"][0] // window["heads"][1]
    for b, phase in enumerate(window["phase"].tolist()):
        for h in range(window["heads"][0]):
            expected = naive.landmark_attention(
                *(x.numpy() for x in (q[b, h], k[b, h // group], v[b, h // group])),
                *(window["block_size"], phase, window["prefix"]),
                fan_out=window["fan_out"],
                bias=bias[:, h // group].tolist(),
            )
            np.testing.assert_allclose(out[b, h], expected, atol=1e-10)


@given(windows(), st.sampled_from([None, 1, 3]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_blockwise_equals_reference_with_gradients(window, top_k, has_cmt):
    """The best blocks, and the context miss token's controlled landmarks, by adjusted scores."""
    q, k, v, bias = leaves = tensors(window)
    token = {}
    if has_cmt:
        leaves = *leaves, torch.randn(window["heads"][1], 4, dtype=torch.float64, requires_grad=True)
        token = {"cmt": leaves[-1], "controlled": torch.rand(len(window["phase"]), 80) < 0.5}
    found = []
    for backend in ("reference", "blockwise"):
        out, lse = attend(window, q, k, v, bias, top_k=top_k, backend=backend, **token)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(out, leaves, weight, allow_unused=True)
        found.append([out.detach(), lse.detach(), *(torch.zeros(()) if x is None else x for x in gradients)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected.expand_as(ours), atol=1e-12, rtol=1e-12)


def test_gradients_are_those_of_finite_differences():
    window = {"length": 13, "prefix": 0, "heads": (1, 1), "block_size": 1, "phase": torch.tensor([1])}
    leaves = tensors(window | {"fan_out": 2, "levels": 2, "seed": 0})
    assert torch.autograd.gradcheck(
        lambda *x: attend(window | {"fan_out": 2}, *x, backend="blockwise")[0], leaves, fast_mode=True
    )


def test_scores_of_a_group_add_up_to_its_own():
    """And the first bias is right where all scores are equal: then groups change nothing."""
    scores, own = torch.randn(1, 2, 3, 16, dtype=torch.float64), torch.tensor([[8, 9, 16]])
    scores = scores.masked_fill(torch.arange(16) >= own[:, None, :, None], -torch.inf)
    bias = torch.randn(2, 2, dtype=torch.float64)
    adjusted, _ = adjust(scores, own, Hierarchy(4, bias))
    groups = adjusted.unflatten(-1, (4, 4)).logsumexp(-1)
    torch.testing.assert_close(
        groups[:, :, :2, :2], (scores.unflatten(-1, (4, 4)).mean(-1) + bias[0, :, None, None])[:, :, :2, :2]
    )
    of_all = scores[:, :, 2].mean(-1) + bias.sum(0)
    torch.testing.assert_close(adjusted[:, :, 2].logsumexp(-1), of_all)
    same = scores.masked_fill(scores > -torch.inf, 0.7)
    torch.testing.assert_close(adjust(same, own, Hierarchy(4, first_bias(4, 2, 2).double()))[0], same)


def test_blocks_before_are_as_blocks_of_the_window():
    """Scores given in two parts, of earlier nodes that are in no complete group yet and of the rest."""
    scores = torch.randn(1, 2, 1, 30, dtype=torch.float64)
    hierarchy, own = Hierarchy(3, torch.randn(2, 2, dtype=torch.float64)), torch.tensor([[30]])
    expected, _ = adjust(scores, own, hierarchy)
    blocks, groups = scores[..., 21:23], [scores[..., i : i + 3].mean(-1) + hierarchy.bias[0, :, None] for i in (18,)]
    adjusted, (of_blocks, of_groups) = adjust(scores[..., 23:], own - 23, hierarchy, [blocks, groups[0][..., None]])
    torch.testing.assert_close(torch.cat([of_blocks, adjusted], -1), expected[..., 21:])
    torch.testing.assert_close(of_groups[..., 0], expected[..., 18:21].logsumexp(-1))


def test_given_gates_are_those_of_the_landmarks():
    window = {"length": 40, "prefix": 7, "heads": (2, 2), "block_size": 3, "phase": torch.tensor([1, 3])}
    q, k, v, bias = (x.detach() for x in tensors(window | {"levels": 1, "seed": 1}))
    common = {"block_size": 3, "phase": window["phase"], "prefix": 7}
    scores, own = landmark_scores(q, k, 3, window["phase"], 7, 0.5)
    for backend in ("reference", "blockwise"):
        given_scores = landmark_attention(q, k, v, gates=scores, backend=backend, **common)
        torch.testing.assert_close(given_scores, landmark_attention(q, k, v, **common))
        gates, _ = adjust(scores, own, Hierarchy(2, bias))
        given_scores = landmark_attention(q, k, v, gates=gates, backend=backend, **common)
        expected = landmark_attention(q, k, v, hierarchy=Hierarchy(2, bias), **common)
        torch.testing.assert_close(given_scores, expected)


def test_packed_documents_have_groups_of_their_own():
    q, k, v = torch.randn(3, 1, 2, 60, 4, dtype=torch.float64)
    settings = {"block_size": 3, "hierarchy": Hierarchy(2, torch.full((2, 2), math.log(2), dtype=torch.float64))}
    packed = landmark_attention(q, k, v, cu_seqlens=torch.tensor([0, 25, 60]), phase=torch.tensor([0, 2]), **settings)
    alone = landmark_attention(*(x[:, :, 25:] for x in (q, k, v)), phase=torch.tensor([2]), **settings)
    torch.testing.assert_close(packed[:, :, 25:], alone, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hierarchy": Hierarchy(2, torch.zeros(1, 2)), "backend": "triton"}, "hierarchy"),
        (
            {"hierarchy": Hierarchy(2, torch.zeros(1, 2)), "bidirectional": True},
            "leave out local_blocks",
        ),
        ({"hierarchy": Hierarchy(1, torch.zeros(1, 2))}, "fan_out"),
        ({"hierarchy": Hierarchy(2, torch.zeros(1, 3))}, "divisor of 2 heads"),
        ({"gates": torch.zeros(1, 2, 9, 1)}, r"gates must have shape \(1, 2, 9, 4\)"),
        ({"gates": torch.zeros(1, 2, 9, 4), "hierarchy": Hierarchy(2, torch.zeros(1, 2))}, "have no effect"),
    ],
)
def test_what_it_cannot_do_is_refused(change, message):
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    with pytest.raises(ValueError, match=message):
        landmark_attention(q, k, v, block_size=2, **change)
