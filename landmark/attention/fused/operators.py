"""Landmark attention by Triton kernels, as operators that `torch.compile` and autograd know.

The kernels are in forward.py and backward.py. Under `torch.use_deterministic_algorithms(True)`, with a context miss
token, and where its tiles do not fit, a pair of kernels computes the gradients, the same numbers every time; otherwise
one kernel, which adds the gradient of the queries up in any order. The kernels read on the device where blocks begin,
so that Python does not wait for the device. Fewer key/value heads than query heads need no copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.fused.tuning import DTYPES, can_launch, is_in_one, is_interpreted, launch
from landmark.attention.inputs import AttentionInputs
from landmark.attention.layout import sizes_of_blocks
from landmark.utils.constants import LOG2_E


@torch.library.custom_op("landmark::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phase: Tensor,
    starts: Tensor | None,
    cmt_scores: Tensor | None,
    controlled: Tensor | None,
    sizes: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
    joint: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, H, T, d), and two log-sum-exps (B, H, T) in units of log 2: outer, and of controlled landmarks alone.

    phase: (samples,), int32. starts: (samples + 1,), int32, rows where packed samples begin and end. cmt_scores:
    (B, H, T), float32, in nats. controlled: (samples, blocks), int8. sizes: (samples, blocks), int32, tokens of each
    block, without cmt_scores (None: ℓ). joint: how much of a block's log-sum-exp is added to its landmark's
    score. Without cmt_scores the last output is empty.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    controlled_lse = torch.empty_like(lse) if cmt_scores is not None else lse.new_empty(0)
    launch(
        "forward",
        *(q, k, v, out, lse, *_of_samples(lse, phase, starts, cmt_scores, controlled_lse, controlled, sizes)),
        *(*q.stride(), *k.stride(), *v.stride(), *out.stride()),
        *(*_shape(q, k, phase, controlled, sizes, prefix), scale * LOG2_E),
        over=q,
        block_size=block_size,
        cmt=cmt_scores is not None,
        samples=None if starts is None else len(phase),
        uneven=sizes is not None,
        joint=joint,
    )
    return out, lse, controlled_lse


def _of_samples(unused: Tensor, phase, starts, cmt_scores, controlled_lse, controlled, sizes) -> tuple[Tensor, ...]:
    """The tensors of samples and context miss token, with another tensor, which is never read, for None."""
    cmt_scores = unused if cmt_scores is None else cmt_scores * LOG2_E
    starts, controlled, sizes = ((phase if x is None else x).contiguous() for x in (starts, controlled, sizes))
    return phase.contiguous(), starts, cmt_scores.contiguous(), controlled_lse, controlled, sizes


def _shape(
    q: Tensor, k: Tensor, phase: Tensor, controlled: Tensor | None, sizes: Tensor | None, prefix: int
) -> tuple[int, ...]:
    blocks = next((x.shape[1] for x in (controlled, sizes) if x is not None), 0)
    return len(phase), blocks, q.shape[2], prefix, q.shape[1], q.shape[1] // k.shape[1]


@_attention.register_fake
def _(q, k, v, phase, starts, cmt_scores, controlled, sizes, block_size, prefix, scale, joint):
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
    sizes: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
    joint: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, in nats, of the context miss token's scores (B, H, T)."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta, d_cmt_scores = torch.empty_like(lse), torch.empty_like(lse if cmt_scores is not None else controlled_lse)
    of_samples = _of_samples(lse, phase, starts, cmt_scores, controlled_lse, controlled, sizes)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    shape = (*_shape(q, k, phase, controlled, sizes, prefix), scale * LOG2_E, scale)
    samples, uneven = None if starts is None else len(phase), sizes is not None
    settings = {"block_size": block_size, "cmt": cmt_scores is not None, "samples": samples, "uneven": uneven}
    settings["joint"] = joint
    in_one = is_in_one(q, block_size, cmt=cmt_scores is not None)
    dq_sum = delta
    if in_one:
        delta = (do.float() * out.float()).sum(-1)
        dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    else:
        tensors = (q, k, v, do, out, lse, dq, delta, d_cmt_scores, *of_samples)
        launch("backward_queries", *tensors, *strides, *out.stride(), *dq.stride(), *shape, over=q, **settings)
    tensors = (q, k, v, do, delta, lse, dk, dv, d_cmt_scores, dq_sum, *of_samples)
    kernel = "backward" if in_one else "backward_keys"
    launch(kernel, *tensors, *strides, *dk.stride(), *dv.stride(), *shape, over=k, **settings)
    if in_one:
        torch.mul(dq_sum, scale, out=dq)
    return dq, dk, dv, d_cmt_scores


@_attention_backward.register_fake
def _(do, q, k, v, out, lse, controlled_lse, phase, starts, cmt_scores, controlled, sizes, *_):
    d_cmt_scores = torch.empty_like(lse if cmt_scores is not None else controlled_lse)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_cmt_scores


def _keep(ctx, inputs, output) -> None:
    q, k, v, phase, starts, cmt_scores, controlled, sizes, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, phase, starts, cmt_scores, controlled, sizes)


def _backward(ctx, grad_out: Tensor, *_):
    saved = ctx.saved_tensors  # activation checkpointing allows reading them once
    dq, dk, dv, d_cmt_scores = _attention_backward(grad_out, *saved, *ctx.numbers)
    has_cmt = ctx.needs_input_grad[5]
    return dq, dk, dv, None, None, d_cmt_scores if has_cmt else None, *[None] * 6


_attention.register_autograd(_backward, setup_context=_keep)


def landmark_attention_fused(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and, without gradient, outer log-sum-exp (B, H, T) of landmark attention.

    Inputs are float32, bfloat16 or float16; sums are float32. Raises ValueError for inputs that the kernels cannot
    compute.
    """
    q, k, v, block_size, phase, prefix, scale, cmt_scores, controlled, cu_seqlens, *_ = inputs
    if q.dtype not in DTYPES:
        raise ValueError(f"backend=triton: q must be of type {', '.join(map(str, DTYPES))}, got {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"backend=triton: q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if scale <= 0:
        raise ValueError(f"backend=triton: scale must be positive, got {scale}")
    if q.device.type == "cpu" and not is_interpreted():
        raise ValueError("backend=triton needs a GPU; to run it on a CPU, slowly, set TRITON_INTERPRET=1")
    if not is_interpreted() and not can_launch(block_size, q.shape[3], q.element_size(), q.device):
        raise ValueError(
            f"backend=triton: blocks of {block_size} tokens with head dimension {q.shape[3]} in {q.dtype} do not fit "
            "into this GPU's shared memory and registers, or it is older than sm_80: use backend=blockwise"
        )
    dtype = q.dtype
    if is_interpreted() and dtype == torch.bfloat16:  # the interpreter does not support it
        q, k, v = q.float(), k.float(), v.float()
    phase = phase.to(q.device, torch.int32, non_blocking=True)
    starts = None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int32, non_blocking=True)
    cmt_scores = None if cmt_scores is None else cmt_scores.float()
    controlled = None if controlled is None else controlled.to(torch.int8)
    sizes = None if inputs.empty is None else sizes_of_blocks(inputs.empty, phase, block_size)
    numbers = block_size, prefix, scale, inputs.joint_softmax
    out, lse, _ = _attention(q, k, v, phase, starts, cmt_scores, controlled, sizes, *numbers)
    return out.to(dtype), (lse / LOG2_E).detach()
