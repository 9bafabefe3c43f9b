"""The loss of a large vocabulary in parts, by the kernel, interpreted, and without it, against cross-entropy."""

import pytest
import torch

from landmark.models import head_loss as parts
from landmark.models.decoder import Decoder
from landmark.models.language_model import summed_loss
from landmark.utils.constants import NO_LOSS
from landmark.utils.window_batch import WindowBatch
from tests.configurations import decoder_config


@pytest.fixture(params=["by the kernel", "without it"])
def way(request, monkeypatch):
    monkeypatch.setattr(parts, "HAS_TRITON", request.param == "by the kernel")
    monkeypatch.setattr(parts, "AT_ONCE", 200)


@pytest.mark.parametrize("vocabulary", [70, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_all_logits(way, weighted, vocabulary):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(vocabulary, 6, requires_grad=True)
    targets = torch.randint(0, vocabulary, (2, 5))
    targets[0, 2] = targets[1, 4] = NO_LOSS
    weights = torch.rand(2, 5) if weighted else None
    loss, count = parts.head_loss(hidden, weight, targets, weights)
    expected, counted = summed_loss(hidden @ weight.T, targets, weights)
    assert int(count) == int(counted) == 8
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(parts.head_loss(hidden, weight, targets, weights)[0], expected)
    for found, right in zip(*(torch.autograd.grad(x * 0.3, (hidden, weight)) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(found, right)


def test_half_precision_rounds_no_more_than_autocast(way):
    """Error of the gradients against float64, beside that of the same in one piece."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 40, 16), torch.randn(300, 16)
    targets = torch.randint(0, 300, (2, 40))

    def gradients(loss_of, dtype=torch.float32):
        leaves = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = loss_of(*leaves)[0]
        return torch.cat([x.flatten().double() for x in torch.autograd.grad(loss, leaves)])

    def whole(hidden, weight):
        return summed_loss(torch.nn.functional.linear(hidden, weight), targets, None)

    exact = gradients(whole, torch.float64)
    ours = (gradients(lambda *leaves: parts.head_loss(*leaves, targets, None)) - exact).norm()
    assert ours <= 1.2 * (gradients(whole) - exact).norm()


def test_a_model_takes_it_where_logits_are_many(way, monkeypatch):
    model = Decoder(decoder_config("transformer", 50, 1, 2, 8, 16))
    tokens = torch.randint(0, 40, (2, 33))
    batch = WindowBatch(tokens[:, :-1], tokens[:, 1:])
    ((loss, _),) = model.window_losses(batch)
    monkeypatch.setattr(parts, "AT_ONCE", 1 << 28)
    ((whole, _),) = model.window_losses(batch)
    assert loss.grad_fn.name() != whole.grad_fn.name()
    torch.testing.assert_close(loss, whole)
