"""The loss of a large vocabulary without all logits at once: gradients come with the loss, some tokens at a time.

The logits of 65,536 tokens and GPT-2's vocabulary take 6.6 GB in half precision, and 13 GB for each of the float32
tensors that a cross-entropy makes of them. Here they take 512 MB, in which their gradient takes their place.
"""

from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import HAS_TRITON, is_interpreted
from landmark.utils.constants import NO_LOSS

AT_ONCE = 1 << 28  # logits


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `summed_loss` of the logits `hidden @ weight.T`, for windows of any size.

    hidden: (B, T, D). weight: (V, D), of the head. targets, weights: (B, T).
    """
    counted, device = targets != NO_LOSS, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    scale = counted.to(torch.promote_types(dtype, torch.float32))
    scale = scale if weights is None else scale * weights
    if not torch.is_grad_enabled():  # a Function does not look
        hidden, weight = hidden.detach(), weight.detach()
    loss = _HeadLoss.apply(hidden.to(dtype).flatten(0, 1), weight.to(dtype), targets.flatten(), scale.flatten())
    assert isinstance(loss, Tensor)
    return loss, counted.sum()


class _HeadLoss(torch.autograd.Function):
    """Σ scale · loss of rows (N, D), and its gradients, which wait in the same types for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        loss, gradients = scale.new_zeros(()), None
        if any(ctx.needs_input_grad):
            gradients = torch.empty_like(hidden), torch.zeros_like(weight, dtype=scale.dtype)
        together = max(1, AT_ONCE // len(weight))
        for start in range(0, len(hidden), together):
            rows = slice(start, start + together)
            logits = hidden[rows] @ weight.T
            loss += losses_and_gradients(logits, targets[rows], scale[rows]).sum()
            if gradients is not None:
                gradients[0][rows] = logits @ weight
                gradients[1].add_(logits.T @ hidden[rows])
        if gradients is not None:
            ctx.save_for_backward(gradients[0], gradients[1].to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *(saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors), None, None


def losses_and_gradients(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """scale · loss of each row of logits (N, V), in the type of `scale`; the gradients take the place of the logits."""
    if HAS_TRITON and (logits.is_cuda or is_interpreted()) and logits.dtype != torch.float64:
        from landmark.models.head_loss_kernels import losses_in_place

        return losses_in_place(logits, targets, scale)
    wide, own = logits.to(scale.dtype), targets.clamp(min=0)[:, None]
    log_sum_exp = wide.logsumexp(-1, keepdim=True)
    losses = scale * (log_sum_exp - wide.gather(-1, own))[:, 0]
    gradients = (wide - log_sum_exp).exp_().mul_(scale[:, None])
    logits.copy_(gradients.scatter_add_(-1, own, -scale[:, None]))
    return losses
