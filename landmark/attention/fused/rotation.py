"""Rotary positions by one Triton kernel, with its gradient, as an operator that `torch.compile` and autograd know.

Each number is read once and written once. In complex arithmetic three kernels take turns, through copies in float32.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
import torch
from torch import Tensor

from landmark.attention.fused.tuning import DTYPES, HAS_TRITON, on_device_of, padded

ROWS = 32  # of a program


def can_rotate(x: Tensor, factors: Tensor) -> bool:
    """Whether the kernel rotates x by these factors: x (B, H, T, d) on a GPU, factors that do not enlarge it."""
    if not (HAS_TRITON and x.is_cuda and x.dtype in DTYPES and x.ndim == 4 and factors.dtype == torch.complex64):
        return False
    return _is_within(factors.shape, x.shape)


def _is_within(factors: torch.Size, x: torch.Size) -> bool:
    """Whether factors (…, d/2) broadcast to (B, H, T, d/2) without making x larger."""
    if len(factors) > len(x) or 2 * factors[-1] != x[-1]:
        return False
    return all(a in (1, b) for a, b in zip(factors[-2::-1], x[-2::-1], strict=False))


@torch.library.custom_op("landmark::rotation", mutates_args=())
def rotation(x: Tensor, factors: Tensor, backwards: bool) -> Tensor:
    """Rotate the pairs of x.

    Args:
        x: (B, H, T, d).
        factors: (…, d/2, 2), float32, cosines and sines, broadcastable to (B, H, T, d/2, 2).
        backwards: whether to rotate by the opposite angles, as the gradient does.

    Returns x's shape, type and, where it is dense, memory layout.
    """
    from landmark.attention.fused.rotation_kernel import rotation as kernel

    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    batch, heads, length, dim = x.shape
    factors, tiles = factors.contiguous().expand(batch, heads, length, dim // 2, 2), -(-length // ROWS)
    with on_device_of(x):
        kernel[(batch * heads * tiles,)](
            *(x, factors, out, *x.stride(), *factors.stride()[:3], *out.stride(), length, heads, tiles),
            -1.0 if backwards else 1.0,
            PAIRS=dim // 2,
            BLOCK=padded(dim // 2),
            ROWS=ROWS,
        )
    return out


@rotation.register_fake
def _(x, factors, backwards):
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    _, factors, ctx.backwards = inputs
    ctx.save_for_backward(factors)


def _backward(ctx, gradient: Tensor):
    (factors,) = ctx.saved_tensors
    return rotation(gradient, factors, not ctx.backwards), None, None


rotation.register_autograd(_backward, setup_context=_keep)
