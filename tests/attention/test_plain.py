"""Plain attention with a prefix."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from landmark.attention import plain
from landmark.attention.plain import causal_attention
from landmark.attention.rotary import RotaryTable, rotary_factors, rotate


@pytest.mark.parametrize("has_flash", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 7, 40])
def test_prefix_attention_equals_masked_softmax(prefix, has_flash, monkeypatch):
    monkeypatch.setattr(plain, "has_flash", lambda device: has_flash)
    q = torch.randn(2, 4, 11, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 11 + prefix, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 2, 11 + prefix, 8, dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(11, 11 + prefix, dtype=torch.bool).triu(prefix + 1)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ wide_k.mT / 8**0.5).masked_fill(hidden, -torch.inf)
    expected = scores.softmax(-1) @ wide_v
    ours = causal_attention(q, k, v, prefix=prefix)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b)


def test_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 16, dtype=torch.float64)
    table = RotaryTable()

    def score(i, j):
        return rotate(q, table(i, 1, q)[0]) @ rotate(k, table(j, 1, k)[0])

    torch.testing.assert_close(score(5, 3), score(1905, 1903))
    assert (score(5, 3) - score(5, 4)).abs() > 1e-6


def test_pairs_rotate_by_position_and_base():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    turned = rotate(x, rotary_factors(torch.tensor(3), 4, 100.0, x.dtype))
    angles = torch.tensor([3.0, 3.0 / 10], dtype=torch.float64)
    expected = torch.stack([angles[0].cos(), angles[0].sin(), -angles[1].sin(), angles[1].cos()])
    torch.testing.assert_close(turned, expected)


def test_half_precision_keeps_its_type_and_odd_dimensions_are_refused():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert rotate(x, RotaryTable()(0, 3, x)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="even head dimension"):
        rotary_factors(torch.arange(2), 5, 10000.0, torch.float32)


def test_on_a_gpu_no_weights_are_written_out(monkeypatch):
    monkeypatch.setattr(plain, "has_flash", lambda device: False)  # as on a GPU; there not even the mask is read
    q, k, v = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (30, 90, 90))
    with torch.profiler.profile(record_shapes=True) as profile:
        causal_attention(q, k, v, prefix=60).sum().backward()
    read = [shape for event in profile.events() for shape in event.input_shapes]
    assert [2, 4, 90, 8] in read
    assert not [shape for shape in read if len(shape) == 4 and shape[:3] == [2, 4, 30] and shape[3] > 8]


@torch.no_grad()
def test_under_autocast_types_may_be_mixed():
    q, k, v = torch.randn(2, 4, 11, 8), torch.randn(2, 4, 18, 8), torch.randn(2, 4, 18, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours = causal_attention(q, k, v, prefix=7)
    torch.testing.assert_close(ours, causal_attention(q.bfloat16(), k.bfloat16(), v, prefix=7), atol=0, rtol=0)


def test_the_fallback_warns_once():
    q = torch.empty(1, 1, 2, 4, device="meta")
    plain._warn.cache_clear()
    with pytest.warns(UserWarning, match="falls back to plain PyTorch"):
        plain.attention_forward(q, q, q, scale=1.0)
    plain.attention_forward(q, q, q, scale=1.0)  # a second warning would be an error of pytest.warns' absence
    plain._warn.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_pytorchs_kernels_return_the_log_sum_exp(dtype, recwarn):
    """Shapes and types alone: no GPU is needed for tensors without numbers."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 11, 16, dtype=dtype, device="cuda")
        k = torch.empty(2, 4, 18, 16, dtype=dtype, device="cuda")
        for keys, causal in ((k, False), (q, True)):
            out, lse = plain.attention_forward(q, keys, keys, scale=1.0, causal=causal)
            assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")
            assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert not [warning for warning in recwarn if "falls back" in str(warning.message)]


def test_what_the_gpus_kernels_lack_is_computed_by_others():
    def is_left(keys=(2, 4, 18, 16), queries=(2, 4, 11, 16), dtype=torch.float32, causal=False, device="cuda"):
        q, k = (torch.empty(shape, dtype=dtype, device=device) for shape in (queries, keys))
        return plain._on_gpu(q, k, k, 1.0, causal) is None

    with FakeTensorMode():
        assert not is_left()
        assert is_left(causal=True)  # counted from the last ones there
        assert is_left(dtype=torch.float64)
        assert is_left((2, 2, 18, 16))
        assert is_left((2, 4, 18, 15), (2, 4, 11, 15))
        assert is_left((1 << 16, 1, 18, 16), (1 << 16, 1, 1, 16))
        assert is_left(device="cpu")
