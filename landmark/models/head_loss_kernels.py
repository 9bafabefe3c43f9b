"""Losses of logits by one kernel, which reads them twice and writes their gradients in their place."""

# Triton's language only looks like Python, and kernels get their compile-time constants by name.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of

BLOCK = 4096  # logits that a program reads at a time


def losses_in_place(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """As `landmark.models.head_loss.losses_and_gradients`."""
    losses = torch.empty_like(scale)
    with on_device_of(logits):
        row_loss[(len(logits),)](logits, targets, scale, losses, logits.stride(0), logits.shape[1], BLOCK, num_warps=8)
    return losses


@triton.jit
def row_loss(Logits, Targets, Scale, Losses, stride, vocabulary, BLOCK: tl.constexpr):
    """The loss and the gradient of one row, in float32. A target that is no id matches no logit, and its scale is 0."""
    row = tl.program_id(0).to(tl.int64)
    target, scale = tl.load(Targets + row), tl.load(Scale + row)
    place = tl.arange(0, BLOCK)
    highest, total, own = tl.load(Logits + row * stride).to(tl.float32), 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        here = start + place < vocabulary
        x = tl.load(Logits + row * stride + start + place, mask=here, other=-float("inf")).to(tl.float32)
        above = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(x - above), 0)
        own += tl.sum(tl.where(start + place == target, x, 0.0), 0)
        highest = above
    log_sum_exp = highest + tl.log(total)
    tl.store(Losses + row, scale * (log_sum_exp - own))
    for start in range(0, vocabulary, BLOCK):
        here = start + place < vocabulary
        at = Logits + row * stride + start + place
        x = tl.load(at, mask=here, other=-float("inf")).to(tl.float32)
        gradient = scale * (tl.exp(x - log_sum_exp) - tl.where(start + place == target, 1.0, 0.0))
        tl.store(at, gradient.to(Logits.dtype.element_ty), mask=here)
