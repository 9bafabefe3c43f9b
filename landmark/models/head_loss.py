"""The loss of a large vocabulary without all logits at once: gradients come with the loss, some tokens at a time.

The logits of 65,536 tokens and GPT-2's vocabulary take 6.6 GB in half precision, and 13 GB for each of the float32
tensors that a cross-entropy makes of them. A GPU's kernel needs 512 MB here, in which their gradient takes their place.

Of Gemma's 262,144 ids a text needs few. Without the kernel, where arithmetic takes the time, gradients are computed for
the ids that are probable enough after one of the tokens to leave a trace in the type's precision (Wijmans et al. 2024,
Cut Cross-Entropy, Section 4.3). Losses are always of all ids.
"""

from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import HAS_TRITON, is_interpreted
from landmark.utils.constants import NO_LOSS

AT_ONCE = 1 << 28  # logits
FEW = 1 << 27  # logits of tokens that need the same ids
IN_CACHE = 1 << 18  # logits whose probabilities fit into a processor's cache
TRACE = 2.0**-11  # times the precision of the type: the least probability that an id has a gradient for


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `summed_loss` of the logits `hidden @ weight.T`, for windows of any size; one backward pass.

    hidden: (B, T, D). weight: (V, D), of the head. targets, weights: (B, T).
    """
    counted, device = targets != NO_LOSS, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    scale = counted.to(torch.promote_types(dtype, torch.float32))
    scale = scale if weights is None else scale * weights
    if not torch.is_grad_enabled():  # a Function does not look
        hidden, weight = hidden.detach(), weight.detach()
    loss = _HeadLoss.apply(hidden.to(dtype).flatten(0, 1), weight, targets.flatten(), scale.flatten())
    assert isinstance(loss, Tensor)
    return loss, counted.sum()


class _HeadLoss(torch.autograd.Function):
    """Σ scale · loss of rows (N, D), and its gradients, which wait for the backward pass: it scales them in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        narrow, loss = weight.to(hidden.dtype), scale.new_zeros(())
        grad_hidden = torch.empty_like(hidden) if any(ctx.needs_input_grad) else None
        grad_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        by_kernel = HAS_TRITON and (hidden.is_cuda or is_interpreted()) and hidden.dtype != torch.float64
        together = max(1, (AT_ONCE if by_kernel else min(AT_ONCE, FEW)) // len(weight))
        logits = hidden.new_empty(min(together, len(hidden)), len(weight))
        for start in range(0, len(hidden), together):
            part = slice(start, start + together)
            rows, part_targets = hidden[part], (targets[part], scale[part])
            torch.mm(rows, narrow.T, out=logits[: len(rows)])
            if by_kernel:
                from landmark.models.head_loss_kernels import losses_in_place

                losses, ids, gradients = losses_in_place(logits[: len(rows)], *part_targets), None, logits[: len(rows)]
            else:
                losses, ids, gradients = _few_ids(logits[: len(rows)], *part_targets, grad_hidden is not None)
            loss += losses.sum()
            if grad_hidden is not None:
                torch.mm(gradients, narrow if ids is None else narrow[ids], out=grad_hidden[part])
            if grad_weight is not None:
                found = (gradients.T @ rows).to(grad_weight.dtype)
                grad_weight = grad_weight.add_(found) if ids is None else grad_weight.index_add_(0, ids, found)
        ctx.gradients = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("a head's loss in parts has one backward pass: its gradients are scaled in place")
        both, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(gradients[0]) for x in both), None, None


def _few_ids(logits: Tensor, targets: Tensor, scale: Tensor, need_gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    """scale · loss of each row of logits (N, V), ids (K,) in order, and the gradients (N, K) of their logits."""
    log_sum_exp, largest = _row_statistics(logits, scale.dtype)
    own = targets.clamp(min=0)
    losses = scale * (log_sum_exp - logits.gather(-1, own[:, None]).to(scale.dtype))[:, 0]
    if not need_gradients:
        return losses, own[:0], logits[:, :0]
    largest[own] = 1
    ids = (largest > TRACE * torch.finfo(logits.dtype).eps).nonzero()[:, 0]
    wide = logits.index_select(1, ids).to(scale.dtype).sub_(log_sum_exp).exp_().mul_(scale[:, None])
    wide[torch.arange(len(own), device=ids.device), torch.searchsorted(ids, own)] -= scale
    return losses, ids, wide.to(logits.dtype)


def _row_statistics(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of each row of logits (N, V), (N, 1), and the largest probability of each id, (V,), in this type."""
    rows = max(1, IN_CACHE // logits.shape[1])
    log_sum_exp, largest = logits.new_empty(len(logits), 1, dtype=dtype), logits.new_zeros(logits.shape[1], dtype=dtype)
    buffer = logits.new_empty(rows, logits.shape[1], dtype=dtype)
    for part, result in zip(logits.split(rows), log_sum_exp.split(rows), strict=True):
        wide = buffer[: len(part)].copy_(part)
        highest = wide.amax(1, keepdim=True)
        total = wide.sub_(highest).exp_().sum(1, keepdim=True)
        torch.add(highest, total.log(), out=result)
        torch.maximum(largest, wide.div_(total).amax(0), out=largest)
    return log_sum_exp, largest
