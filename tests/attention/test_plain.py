"""Plain attention with a prefix, and with a log-sum-exp."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from landmark.attention import plain
from landmark.attention.plain import causal_attention


@pytest.mark.parametrize("prefix", [0, 1, 7, 40])
def test_prefix_attention_equals_masked_softmax(prefix):
    q = torch.randn(2, 4, 11, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 11 + prefix, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    hidden = torch.ones(11, 11 + prefix, dtype=torch.bool).triu(prefix + 1)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ wide_k.mT / 8**0.5).masked_fill(hidden, -torch.inf)
    ours, expected = causal_attention(q, k, v, prefix=prefix), scores.softmax(-1) @ wide_v
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b)
    q, k, v = q.detach().float(), k.detach().float(), v.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours = causal_attention(q, k, v, prefix=prefix)
    torch.testing.assert_close(ours, causal_attention(q.bfloat16(), k.bfloat16(), v, prefix=prefix), atol=0, rtol=0)


def test_no_weights_are_written_out():
    """Nor one mask for each head; on a GPU not even the one is read."""
    q, k, v = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (30, 90, 90))
    with torch.profiler.profile(record_shapes=True) as profile:
        causal_attention(q, k, v, prefix=60).sum().backward()
    read = [shape for event in profile.events() for shape in event.input_shapes]
    assert [2, 4, 90, 8] in read
    assert not [shape for shape in read if len(shape) == 4 and shape[:3] == [2, 4, 30] and shape[3] > 8]


def test_the_fallback_warns_once():
    q = torch.empty(1, 1, 2, 4, device="meta")
    plain._warn.cache_clear()
    with pytest.warns(UserWarning, match="falls back to plain PyTorch"):
        plain.attention_forward(q, q, q, scale=1.0)
    with warnings.catch_warnings(action="error"):
        plain.attention_forward(q, q, q, scale=1.0)
    plain._warn.cache_clear()


def test_on_a_gpu_pytorchs_kernels_return_the_log_sum_exp_and_what_they_lack_is_computed_by_others(recwarn):
    """Shapes and types alone: no GPU is needed for tensors without numbers."""

    def is_left(keys=(2, 4, 18, 16), queries=(2, 4, 11, 16), dtype=torch.float32, causal=False, device="cuda"):
        q, k = (torch.empty(shape, dtype=dtype, device=device) for shape in (queries, keys))
        if (found := plain._on_gpu(q, k, k, 1.0, causal)) is None:
            return True
        out, lse = plain.attention_forward(q, k, k, scale=1.0, causal=causal)
        assert out.shape == q.shape == found[0].shape
        assert (out.dtype, out.device.type, lse.shape, lse.dtype) == (dtype, "cuda", q.shape[:3], torch.float32)
        return False

    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float32):
            assert not is_left(dtype=dtype)
            assert not is_left((2, 4, 11, 16), dtype=dtype, causal=True)
        assert is_left(causal=True)  # counted from the last ones there
        assert is_left(dtype=torch.float64)
        assert is_left((2, 2, 18, 16))
        assert is_left((2, 4, 18, 15), (2, 4, 11, 15))
        assert is_left((1 << 16, 1, 18, 16), (1 << 16, 1, 1, 16))
        assert is_left(device="cpu")
    assert not [warning for warning in recwarn if "falls back" in str(warning.message)]
