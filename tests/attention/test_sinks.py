"""A learned score of each head for a place without a value."""

import pytest
import torch

from landmark.attention import landmark_attention
from landmark.attention.sinks import with_sinks


def inputs(length):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, length, 8, generator=generator, dtype=torch.float64)
    return q, k, v, torch.randn(4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_inside_a_block_it_is_one_more_score_of_the_softmax(backend):
    """Values and gradients, against a softmax with an extra column."""
    q, k, v, sinks = (x.requires_grad_() for x in inputs(6))
    found = landmark_attention(q, k, v, block_size=9, sinks=sinks, backend=backend)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ keys.mT / 8**0.5).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    column = sinks[None, :, None, None].expand(2, -1, 6, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values
    torch.testing.assert_close(found, expected)
    for x in (q, k, v, sinks):
        a, b = (torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0] for out in (found, expected))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_over_blocks_it_takes_its_share_of_the_outer_softmax(backend):
    q, k, v, sinks = inputs(31)
    phase = torch.tensor([0, 3])
    settings = {"block_size": 4, "phase": phase, "backend": backend}
    out, lse = landmark_attention(q, k, v, return_lse=True, **settings)
    expected, total = with_sinks(out, lse, sinks)
    found, found_lse = landmark_attention(q, k, v, sinks=sinks, return_lse=True, **settings)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_lse, total)


def test_not_together_with_a_context_miss_token():
    q, k, v, sinks = inputs(6)
    with pytest.raises(ValueError, match="exclude each other"):
        landmark_attention(q, k, v, block_size=4, sinks=sinks, cmt=k[0, :, 0])


def test_scores_keep_their_precision_beside_half_precision():
    """Under autocast q is bfloat16; a score between two of its numbers is not rounded."""
    q, k, v, _ = (x.float() for x in inputs(31))
    sinks = torch.full((4,), 8.0 + 1 / 64)  # rounded it would be 8
    with torch.autocast("cpu", torch.bfloat16):
        settings = {"block_size": 4, "backend": "blockwise", "return_lse": True}
        lse = landmark_attention(q, k, v, **settings)[1]
        found = landmark_attention(q, k, v, sinks=sinks, **settings)[1]
    torch.testing.assert_close(found, torch.logaddexp(lse, sinks[:, None]), rtol=0, atol=1e-3)
