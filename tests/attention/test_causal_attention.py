"""Plain attention with a prefix."""

import pytest
import torch

from landmark.attention import flash
from landmark.attention.causal import causal_attention
from landmark.attention.rotary import RotaryTable, rotary_factors, rotate


@pytest.mark.parametrize("has_flash", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 7, 40])
def test_prefix_attention_equals_masked_softmax(prefix, has_flash, monkeypatch):
    monkeypatch.setattr(flash, "_has_flash", lambda device: has_flash)
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


def test_the_fallback_warns_once():
    flash._has_flash.cache_clear()
    with pytest.warns(UserWarning, match="falls back to plain PyTorch"):
        assert not flash._has_flash("meta")
    flash._has_flash("meta")  # a second warning would be an error of pytest.warns' absence
    flash._has_flash.cache_clear()
