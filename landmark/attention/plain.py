"""Plain attention: with its log-sum-exp, so that attention to parts can be merged, and causal with a prefix.

Attention with a log-sum-exp uses PyTorch's own kernels: flash attention on the CPU, and on GPUs in half precision,
the memory-efficient kernel on GPUs in float32. On another device, or for what they lack, it computes the same with
explicit weights. It has no gradients, `causal_attention` has.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from landmark.attention.layout import as_autocast, without_autocast
from landmark.attention.scoring import capped

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
LARGEST_GRID = (1 << 16) - 1  # of CUDA, along the axes on which kernels have batch and heads
WIDEST = 256  # numbers of a head in CUDA's flash kernels


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention (B, H, T, d), and its log-sum-exp (B, H, T), in float32 for half precision.

    q: (B, H, T, d). k, v: (B, H, S, d). causal: hide keys j > i from query i, both counted from 0. softcap: cap of the
    scores, which flash kernels do not have.
    """
    if softcap is None:
        if q.device.type == "cpu" and _FORWARD is not None:
            return _FORWARD(q, k, v, 0.0, causal, scale=scale)
        if (found := _on_gpu(q, k, v, scale, causal)) is not None:
            return found
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = capped(q.to(compute) @ k.to(compute).mT * scale, softcap)
    if causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor] | None:
    """What `attention_forward` returns, by the kernels of CUDA; None: they do not compute it.

    They count causal positions from the last query and key, not from the first.
    """
    (batch, heads, length, dim), kinds = q.shape, {x.dtype for x in (q, k, v)}
    has_kernel = q.is_cuda and k.shape[1] == heads and dim % 8 == 0 and batch <= LARGEST_GRID and heads <= LARGEST_GRID
    if not has_kernel or len(kinds) > 1 or (causal and length != k.shape[2]):
        return None
    if q.dtype in (torch.float16, torch.bfloat16) and dim <= WIDEST:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    if q.dtype != torch.float32:
        return None
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse.narrow(-1, 0, length)  # the kernel fills up to a multiple of 32


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to all keys, of attention to two parts of them: each is an output (…, T, d) and a log-sum-exp (…, T).

    Without a gradient, and in the type of the first output.
    """
    (out, out_lse), (other, other_lse) = first, second
    lse = torch.logaddexp(out_lse, other_lse)
    both = out * (out_lse - lse).exp()[..., None].to(out.dtype)
    return both.addcmul_(other, (other_lse - lse).exp()[..., None].to(out.dtype)), lse


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, prefix: int = 0) -> Tensor:
    """Causal softmax attention of T queries, which belong to the last T of prefix + T keys: (B, H, T, d).

    q: (B, H, T, d), k, v: (B, H_kv, prefix + T, d), rotated. Under autocast they are computed in its type.
    """
    if q.shape[2] == 1:
        return _attend_to_all(q, k, v)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if prefix == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = as_autocast(q, k, v)
    with without_autocast(q):  # kernels of GPUs know this mask without reading it
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


# cuDNN, which PyTorch prefers on some GPUs, makes a plan for each number of keys. It seems that a token of three layers
# took 38 ms for that on an H200.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query (B, H, 1, d) to all keys. Heads that share keys become its queries: no key is copied."""
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    with sdpa_kernel(_WITHOUT_PLANS) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)
