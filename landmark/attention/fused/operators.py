"""Landmark attention by Triton kernels, as operators that `torch.compile` and autograd know.

One kernel computes the gradient of queries, another one the gradients of keys and values, so that no program adds to
numbers that another one wrote, and the numbers are the same every time. The device itself reads where blocks begin, so
that nothing waits for it. Keys and values of fewer heads are read as they are. The kernels are in forward.py and
backward.py.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from landmark.attention.fused.tuning import fits, is_interpreted, launch
from landmark.attention.inputs import AttentionInputs

LOG2_E = math.log2(math.e)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_TRITON = importlib.util.find_spec("triton") is not None


@torch.library.custom_op("landmark::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phase: Tensor,
    starts: Tensor | None,
    cmt_scores: Tensor | None,
    controlled: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, H, T, d), log-sum-exp (B, H, T), and log-sum-exp (B, H, T) of the controlled landmarks alone, both in
    units of log 2.

    phase: (samples,), int32. starts: (samples + 1,), int32, rows where packed samples begin. cmt_scores: (B, H, T),
    float32, in nats. controlled: (samples, blocks), int8.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    controlled_lse = torch.empty_like(lse) if cmt_scores is not None else lse.new_empty(0)
    launch(
        "forward",
        *(q, k, v, out, lse, *_of_samples(lse, phase, starts, cmt_scores, controlled_lse, controlled)),
        *(*q.stride(), *k.stride(), *v.stride(), *out.stride()),
        *(*_sizes(q, k, phase, controlled, prefix), scale * LOG2_E),
        over=q,
        block_size=block_size,
        cmt=cmt_scores is not None,
        samples=None if starts is None else len(phase),
    )
    return out, lse, controlled_lse


def _of_samples(unused: Tensor, phase, starts, cmt_scores, controlled_lse, controlled) -> tuple[Tensor, ...]:
    """The tensors of samples and of the context miss token; another tensor, never read, stands for one that is None."""
    cmt_scores = unused if cmt_scores is None else cmt_scores * LOG2_E
    starts, controlled = (phase if x is None else x for x in (starts, controlled))
    return phase.contiguous(), starts.contiguous(), cmt_scores.contiguous(), controlled_lse, controlled.contiguous()


def _sizes(q: Tensor, k: Tensor, phase: Tensor, controlled: Tensor | None, prefix: int) -> tuple[int, ...]:
    blocks = 0 if controlled is None else controlled.shape[1]
    return len(phase), blocks, q.shape[2], prefix, q.shape[1], q.shape[1] // k.shape[1]


@_attention.register_fake
def _(q, k, v, phase, starts, cmt_scores, controlled, block_size, prefix, scale):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), lse, torch.empty_like(lse) if cmt_scores is not None else lse.new_empty(0)


@torch.library.custom_op("landmark::attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    controlled_lse: Tensor,
    phase: Tensor,
    starts: Tensor | None,
    cmt_scores: Tensor | None,
    controlled: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, in nats, of the context miss token's scores (B, H, T)."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta, d_cmt_scores = torch.empty_like(lse), torch.empty_like(lse if cmt_scores is not None else controlled_lse)
    of_samples = _of_samples(lse, phase, starts, cmt_scores, controlled_lse, controlled)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    sizes = (*_sizes(q, k, phase, controlled, prefix), scale * LOG2_E, scale)
    samples = None if starts is None else len(phase)
    settings = {"block_size": block_size, "cmt": cmt_scores is not None, "samples": samples}
    tensors = (q, k, v, do, out, lse, dq, delta, d_cmt_scores, *of_samples)
    launch("backward_queries", *tensors, *strides, *out.stride(), *dq.stride(), *sizes, over=q, **settings)
    tensors = (q, k, v, do, delta, lse, dk, dv, d_cmt_scores, *of_samples)
    launch("backward_keys", *tensors, *strides, *dk.stride(), *dv.stride(), *sizes, over=k, **settings)
    return dq, dk, dv, d_cmt_scores


@_attention_backward.register_fake
def _(do, q, k, v, out, lse, controlled_lse, phase, starts, cmt_scores, controlled, block_size, prefix, scale):
    d_cmt_scores = torch.empty_like(lse if cmt_scores is not None else controlled_lse)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_cmt_scores


def _keep(ctx, inputs, output) -> None:
    q, k, v, phase, starts, cmt_scores, controlled, ctx.block_size, ctx.prefix, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, phase, starts, cmt_scores, controlled)


def _backward(ctx, grad_out: Tensor, *_):
    sizes = (ctx.block_size, ctx.prefix, ctx.scale)
    dq, dk, dv, d_cmt_scores = _attention_backward(grad_out, *ctx.saved_tensors, *sizes)
    return dq, dk, dv, None, None, d_cmt_scores if ctx.saved_tensors[8] is not None else None, *[None] * 4


_attention.register_autograd(_backward, setup_context=_keep)


def landmark_attention_fused(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; the latter carries no gradient.

    float32, bfloat16 or float16, computed in float32. Raises ValueError for inputs that the kernels cannot compute.
    """
    q, k, v, block_size, phase, prefix, scale, cmt_scores, controlled, cu_seqlens = inputs
    if q.dtype not in DTYPES:
        raise ValueError(f"backend=triton: computes {', '.join(map(str, DTYPES))}, got {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"backend=triton: q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if scale <= 0:
        raise ValueError(f"backend=triton: scale must be positive, got {scale}")
    if q.device.type == "cpu" and not is_interpreted():
        raise ValueError("backend=triton: needs a GPU, or TRITON_INTERPRET=1 to be interpreted, slowly, on a CPU")
    if not is_interpreted() and not fits(block_size, q.shape[3], q.element_size()):
        raise ValueError(
            f"backend=triton: a block of {block_size} with heads of {q.shape[3]} in {q.dtype} is more than a GPU holds "
            "at once: use backend=blockwise"
        )
    dtype = q.dtype
    if is_interpreted() and dtype == torch.bfloat16:  # the interpreter does not know it
        q, k, v = q.float(), k.float(), v.float()
    phase = phase.to(q.device, torch.int32, non_blocking=True)
    starts = None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int32, non_blocking=True)
    cmt_scores = None if cmt_scores is None else cmt_scores.float()
    controlled = None if controlled is None else controlled.to(torch.int8)
    out, lse, _ = _attention(q, k, v, phase, starts, cmt_scores, controlled, block_size, prefix, scale)
    return out.to(dtype), (lse / LOG2_E).detach()
