"""Plain attention: causal with a prefix, keys before the first query, as in Transformer-XL and in caches."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from landmark.attention.flash import attention_backward, attention_forward, has_flash, merged
from landmark.attention.inputs import as_autocast, without_autocast


class _PrefixAttention(torch.autograd.Function):
    """Two calls of flash attention, over the prefix and over the queries' own tokens, merged by their log-sum-exps."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, prefix: int, scale: float) -> Tensor:
        before = attention_forward(q, k[:, :, :prefix], v[:, :, :prefix], scale=scale)
        own = attention_forward(q, k[:, :, prefix:], v[:, :, prefix:], scale=scale, causal=True)
        out, lse = merged(before, own)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prefix, ctx.scale = prefix, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        grads = []
        for keys, causal in ((slice(None, ctx.prefix), False), (slice(ctx.prefix, None), True)):
            grads.append(
                attention_backward(grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, scale=ctx.scale, causal=causal)
            )
        (dq_before, dk_before, dv_before), (dq_own, dk_own, dv_own) = grads
        dk, dv = torch.cat([dk_before, dk_own], 2), torch.cat([dv_before, dv_own], 2)
        return dq_before + dq_own, dk, dv, None, None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, prefix: int = 0, scale: float | None = None) -> Tensor:
    """Causal softmax attention of T queries, which belong to the last T of prefix + T keys.

    With a prefix, PyTorch's own attention takes a mask on a GPU, whose kernels know this one without reading it; on the
    CPU, where they would read a mask of T · (prefix + T) numbers, attention is merged from two parts without a mask.

    Args:
        q: (B, H, T, d), already rotated. Under autocast q, k and v are computed in its type.
        k, v: (B, H_kv, prefix + T, d), k rotated, H_kv a divisor of H.
        prefix: keys before the first query.
        scale: factor of the scores; None: 1/√d.

    Returns (B, H, T, d).
    """
    if q.shape[2] == 1:
        return _attend_to_all(q, k, v, scale)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if prefix == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    q, k, v = as_autocast(q, k, v)
    with without_autocast(q):
        if has_flash(q.device.type):
            return _PrefixAttention.apply(q, k, v, prefix, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


# cuDNN, which PyTorch prefers on some GPUs, makes a plan for each number of keys. It seems that a token of three layers
# took 38 ms for that on an H200.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attention of one query (B, H, 1, d) to all keys. Heads that share keys become its queries: no key is copied."""
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    with sdpa_kernel(_WITHOUT_PLANS) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
