"""Plain attention: with its log-sum-exp, so that attention to parts can be merged, and causal with a prefix.

Attention with a log-sum-exp uses PyTorch's own kernels: flash attention on the CPU, and on GPUs in half precision,
the memory-efficient kernel on GPUs in float32. On another device, or for what they lack, it computes the same with
explicit weights. On a CPU with units for bfloat16 many rows are computed by products, because these take half the time
of the flash kernel or less. It has no gradients, `causal_attention` has.
"""

import functools
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from landmark.attention.layout import as_autocast, without_autocast
from landmark.attention.scoring import capped
from landmark.utils.hardware import has_units

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
FEW_ROWS = 32  # for fewer, products gain little
SCORES = 1 << 21  # made at a time: they stay in a processor's cache
PART = 64  # queries of a window's part
LARGEST_GRID = (1 << 16) - 1  # of CUDA, along the axes on which kernels have batch and heads
WIDEST = 256  # numbers of a head in CUDA's flash kernels


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    softcap: float | None = None,
    level: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention (B, H, T, d), and its log-sum-exp (B, H, T), in float32 for half precision.

    q: (B, H, T, d). k, v: (B, H, S, d). causal: hide keys j > i from query i, both counted from 0. softcap: cap of the
    scores, which flash kernels do not have. level: (B, H, T), a log-sum-exp that is expected to be near: with it, not
    causal, products in bfloat16 take the place of the flash kernel where they are faster.
    """
    if softcap is None:
        by_products = not causal and q.dtype == torch.bfloat16 and q.shape[2] >= FEW_ROWS
        by_products = by_products and has_units(q.device.type) and not _flash_has_units()
        if level is not None and by_products and (found := _by_products(q, k, v, scale, level)) is not None:
            return found
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


@functools.cache
def _flash_has_units() -> bool:
    """Whether PyTorch's flash kernel for CPUs multiplies in bfloat16, too: it does so with AMX alone."""
    return torch.cpu._is_amx_tile_supported()


def _by_products(q: Tensor, k: Tensor, v: Tensor, scale: float, level: Tensor) -> tuple[Tensor, Tensor] | None:
    """What `attention_forward` returns, in bfloat16; None: a score is too far above its level.

    Scores are rounded when their row's level has been subtracted, so that the errors of large weights are small.
    """
    shape, level, parts = q.shape, (level - math.log(k.shape[2]) / 2).to(q.dtype)[..., None], []
    q, k, v, level = (x.flatten(0, 1) for x in (q, k, v, level))
    together = len(k) if k.is_contiguous() else 1  # a product copies matrices that are not neighbours
    for first in range(0, len(k), together):
        rows, keys, values, near = (x[first : first + together].view(together, *x.shape[1:]) for x in (q, k, v, level))
        step = max(1, SCORES // (together * k.shape[1]))
        for part, low in zip(rows.split(step, 1), near.split(step, 1), strict=True):
            out, total = _weighted(low.neg().expand(-1, -1, keys.shape[1]), part, keys, values, scale)
            if total.isinf().any():
                return None
            parts.append((out, low + total.log()))
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return out.view(shape), lse.view(shape[:3])


def _weighted(base: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention (n, T, d) with the scores base + scale · q·k, and the sums (n, T, 1) of their exponentials, in float32.

    base: (n, T, S), which is added before scores are rounded. q: (n, T, d). k, v: (n, S, d).
    """
    weights = torch.baddbmm(base, q, k.mT, alpha=scale).exp_()
    total = weights.sum(-1, keepdim=True).float()
    return (weights @ v / total.clamp_min(torch.finfo(total.dtype).tiny)).to(q.dtype), total


def has_products(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `window_attention` computes what such queries, keys and values give."""
    if q.shape[2] < FEW_ROWS or {x.dtype for x in (q, k, v)} != {torch.bfloat16} or v.shape[3] != q.shape[3]:
        return False
    return has_units(q.device.type)


def window_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> Tensor | None:
    """Attention (B, H, T, d) of each query to its last `window` keys, its own the last; None: not by products.

    q: (B, H, T, d), of the last T of the keys. k, v: (B, H_kv, S, d). Without a gradient.
    """
    (_, heads, length, dim), before, parts = q.shape, k.shape[2] - q.shape[2], []
    if not has_products(q, k, v):
        return None
    grouped = q.reshape(-1, heads // k.shape[1], length, dim)
    for first in range(0, length, PART):
        part = grouped[:, :, first : first + PART]
        start, stop = max(0, before + first - window + 1), before + first + part.shape[2]
        keys, values = (x[:, :, start:stop].flatten(0, 1).contiguous() for x in (k, v))
        rows, hidden = part.flatten(1, 2), _outside(window, before + first - start, part.shape[2], stop - start)
        scores = torch.baddbmm(rows.new_zeros(()), rows, keys.mT, beta=0, alpha=scale).view(*part.shape[:3], -1)
        highest = scores.masked_fill_(hidden, -torch.inf).amax(-1, keepdim=True)
        out, _ = _weighted(torch.where(hidden, -torch.inf, -highest).flatten(1, 2), rows, keys, values, scale)
        parts.append(out.view(part.shape))
    return torch.cat(parts, 2).view(q.shape)


@functools.lru_cache(maxsize=32)
def _outside(window: int, before: int, queries: int, keys: int) -> Tensor:
    """Keys that queries do not see, (queries, keys). before: keys before the first query's own."""
    with torch.inference_mode(False):
        distance = before + torch.arange(queries)[:, None] - torch.arange(keys)
        return (distance < 0) | (distance >= window)


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
