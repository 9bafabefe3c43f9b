"""Plain attention that also returns its log-sum-exp, forward and backward, so that attention to parts can be merged.

On the CPU it uses PyTorch's own flash kernels. On another device, or where this version of PyTorch lacks the kernels,
it computes the same with explicit weights, and warns once.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


@functools.cache
def _has_flash(device: str) -> bool:
    if device == "cpu" and _FORWARD is not None and _BACKWARD is not None:
        return True
    warnings.warn(
        f"torch {torch.__version__} has no flash attention with a log-sum-exp for device {device!r}: "
        "attention in parts falls back to plain PyTorch, exact but slower",
        stacklevel=4,
    )
    return False


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp.

    Args:
        q: (B, H, T, d).
        k, v: (B, H, S, d).
        scale: factor of the scores.
        causal: whether to hide keys j > i from query i, both counted from 0.

    Returns (B, H, T, d) and, in float32 for half precision, (B, H, T).
    """
    if _has_flash(q.device.type):
        assert _FORWARD is not None
        return _FORWARD(q, k, v, 0.0, causal, scale=scale)
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v where the weights are w = exp(s − lse), for *any* `out` and `lse`.

    The gradient of the scores is ds = w·(grad_out·v − grad_out·out), as in every flash backward pass. `out` and `lse`
    may belong to these keys alone, or to a softmax over more keys.

    Args:
        grad_out: (B, H, T, d).
        q, k, v, scale, causal: as in `attention_forward`.
        out: (B, H, T, d), output of the softmax.
        lse: (B, H, T), log-sum-exp of the softmax.

    Returns the three gradients, in the shapes of q, k and v.
    """
    if _has_flash(q.device.type):
        assert _BACKWARD is not None
        return _BACKWARD(grad_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    weights = (_scores(q, k, scale, causal) - lse[..., None]).exp()
    grad = grad_out.to(weights.dtype)
    row = (grad * out.to(weights.dtype)).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.to(weights.dtype).transpose(-1, -2) - row) * scale
    grad_q = grad_scores @ k.to(weights.dtype)
    grad_k = grad_scores.transpose(-1, -2) @ q.to(weights.dtype)
    grad_v = weights.transpose(-1, -2) @ grad
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(compute) @ k.to(compute).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores
