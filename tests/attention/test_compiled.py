"""Blockwise landmark attention in a graph of `torch.compile`, against the same without a graph."""

import pytest
import torch

from landmark.attention import landmark_attention


def cases():
    generator = torch.Generator().manual_seed(0)
    cmt = torch.randn(2, 8, generator=generator, requires_grad=True)
    controlled = torch.rand(2, 6, generator=generator) < 0.5
    return {
        "windows cut anywhere, half precision": {"phase": torch.tensor([0, 4])},
        "a context miss token": {"phase": torch.tensor([1, 6]), "cmt": cmt, "controlled": controlled},
        "packed documents and sinks": {
            "cu_seqlens": torch.tensor([0, 11, 11, 30]),
            "phase": torch.tensor([2, 0, 0]),
            "sinks": torch.randn(4, generator=generator, requires_grad=True),
            "top_k": 2,
        },
        "a cap of the scores": {"phase": torch.tensor([0, 4]), "softcap": 0.5},
        "both directions, local blocks": {"phase": torch.tensor([0, 4]), "bidirectional": True, "local_blocks": 1},
    }


@pytest.mark.parametrize("case", cases())
def test_attention_compiles_as_one_graph(case):
    """Outputs and gradients are those without a graph; some query heads share a key head."""
    given, generator = cases()[case], torch.Generator().manual_seed(1)
    batch = 1 if "cu_seqlens" in given else 2
    dtype = torch.bfloat16 if "half" in case else torch.float32
    q, k, v = (torch.randn(batch, heads, 30, 8, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2))
    leaves = [q, k, v, *(x for x in (given.get("cmt"), given.get("sinks")) if x is not None)]

    def attend(q, k, v):
        return landmark_attention(q * 2, k, v, block_size=6, **given) * 2

    found, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
