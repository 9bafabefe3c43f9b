"""Blockwise landmark attention in a graph of `torch.compile`, against the same without a graph."""

import pytest
import torch

from landmark.attention import ContextMiss, Grouped, Packed, Scoring, Sinks, Window, landmark_attention


def cases():
    generator = torch.Generator().manual_seed(0)
    key, scores = (torch.randn(*size, generator=generator, requires_grad=True) for size in ((2, 8), (4,)))
    controlled = torch.rand(2, 6, generator=generator) < 0.5
    packed = Packed(6, torch.tensor([2, 0, 0]), torch.tensor([0, 11, 11, 30]))
    cut = Window(6, torch.tensor([0, 4]))
    return {
        "windows cut anywhere, half precision": {"layout": cut},
        "a context miss token": {"layout": cut, "extra": ContextMiss(key, controlled)},
        "packed documents and sinks": {"layout": packed, "extra": Sinks(scores), "top_k": 2},
        "a cap of the scores and a joint softmax": {"layout": cut, "scoring": Scoring(None, 0.5), "gate": Grouped(0.5)},
    }


@pytest.mark.parametrize("case", cases())
def test_attention_compiles_as_one_graph(case):
    """Outputs, log-sum-exps and gradients are those without a graph; some query heads share a key head."""
    given, generator = cases()[case], torch.Generator().manual_seed(1)
    batch = 1 if "packed" in case else 2
    dtype = torch.bfloat16 if "half" in case else torch.float32
    q, k, v = (torch.randn(batch, heads, 30, 8, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2))
    leaves = [q, k, v, *(x for x in vars(given.get("extra", Sinks(q))).values() if x is not q and x is not None)]
    leaves = [x for x in leaves if x.requires_grad]

    def attend(q, k, v):
        out, lse = landmark_attention(q * 2, k, v, **given)
        return out * 2, lse

    found, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    totals = [out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum() for out, lse in (found, expected)]
    for ours, theirs in zip(*(torch.autograd.grad(total, leaves) for total in totals), strict=True):
        torch.testing.assert_close(ours, theirs)
