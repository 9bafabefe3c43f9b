"""The Triton kernel that rotates, interpreted, against complex arithmetic."""

import pytest
import torch

from landmark.attention.rotary import _is_within, rotary_factors, rotate, rotation


@pytest.mark.parametrize("layout", ["heads first", "rows first", "part of a projection"])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 6), (torch.float16, 16)])
def test_rotates_as_complex_numbers_do_with_gradients(layout, dtype, dim):
    x = torch.randn(2, 3, 37, dim).to(dtype)
    if layout != "heads first":
        wide = torch.randn(2, 37, 9 if layout == "part of a projection" else 3, dim).to(dtype)
        x = wide.transpose(1, 2)[:, :3]
    x = x.detach().requires_grad_()
    gradient = torch.randn(2, 3, 37, dim).to(dtype)
    tolerance = {"atol": 2 * torch.finfo(dtype).eps, "rtol": 2 * torch.finfo(dtype).eps}
    for positions in (torch.arange(37), torch.randint(0, 500, (2, 1, 37)), torch.tensor([5])):
        factors = rotary_factors(positions, dim, 100.0, dtype)
        assert _is_within(factors.shape, x.shape)
        ours, expected = rotation(x, torch.view_as_real(factors), False), rotate(x, factors)
        torch.testing.assert_close(ours, expected, **tolerance)
        for a, b in zip(torch.autograd.grad(ours, x, gradient), torch.autograd.grad(expected, x, gradient)):
            torch.testing.assert_close(a, b, **tolerance)


def test_factors_that_would_enlarge_x_are_left_to_complex_numbers():
    assert not _is_within(torch.Size([3, 1, 5, 1, 4]), torch.Size([2, 5, 3, 8]))
    assert not _is_within(torch.Size([2, 1, 5, 4]), torch.Size([1, 3, 5, 8]))
    assert not _is_within(torch.Size([5, 4]), torch.Size([2, 3, 5, 16]))


def test_passes_opcheck():
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    torch.library.opcheck(rotation, (x, torch.randn(5, 2, 2), False))
