"""Landmark attention by Triton kernels, as operators that `torch.compile` and autograd know.

Under `torch.use_deterministic_algorithms(True)`, with a context miss token, and where tiles do not fit, a pair of
kernels computes the gradients, the same numbers every time; otherwise one kernel. The kernels read on the device where
blocks begin, so that Python does not wait for it.
"""

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import DTYPES, can_launch, is_in_one, is_interpreted, launch, on_device_of, padded
from landmark.attention.layout import AttentionInputs
from landmark.utils.constants import LOG2_E

_WINDOWS = "Tensor phase, Tensor? starts, Tensor? extra, Tensor? controlled"
_WINDOWS += ", int block_size, int prefix, float scale, float alpha"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_WINDOWS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor do, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor controlled_lse, "
    f"{_WINDOWS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("landmark::attention", mutates_args=(), schema=_FORWARD)
def _attention(q, k, v, phase, starts, extra, controlled, block_size, prefix, scale, alpha):
    """Output (B, H, T, d), and two log-sum-exps (B, H, T) in units of log 2: outer, and of controlled landmarks alone.

    phase: (samples,), int32. starts: (samples + 1,), int32, rows where packed samples begin and end. extra: (B, H, T),
    float32, in nats. controlled: (samples, blocks), int8. The others are those of `AttentionInputs`. Without extra the
    last output is empty.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    controlled_lse = torch.empty_like(lse) if extra is not None else lse.new_empty(0)
    launch(
        "forward",
        *(q, k, v, out, lse, *_per_sample(lse, phase, starts, extra, controlled_lse, controlled)),
        *(*q.stride(), *k.stride(), *v.stride(), *out.stride()),
        *(*_shape(q, k, phase, controlled, prefix), scale * LOG2_E),
        over=q,
        block_size=block_size,
        cmt=extra is not None,
        samples=None if starts is None else len(phase),
        alpha=alpha,
    )
    return out, lse, controlled_lse


def _per_sample(unused: Tensor, phase, starts, extra, controlled_lse, controlled) -> tuple[Tensor, ...]:
    """The tensors of samples and extra place, with another tensor, which is never read, for None."""
    extra = unused if extra is None else extra * LOG2_E
    starts, controlled = ((phase if x is None else x).contiguous() for x in (starts, controlled))
    return phase.contiguous(), starts, extra.contiguous(), controlled_lse, controlled


def _shape(q: Tensor, k: Tensor, phase: Tensor, controlled: Tensor | None, prefix: int) -> tuple[int, ...]:
    blocks = 0 if controlled is None else controlled.shape[1]
    return len(phase), blocks, q.shape[2], prefix, q.shape[1], q.shape[1] // k.shape[1]


@_attention.register_fake
def _(q, k, v, phase, starts, extra, controlled, block_size, prefix, scale, alpha):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), lse, torch.empty_like(lse) if extra is not None else lse.new_empty(0)


@torch.library.custom_op("landmark::attention_backward", mutates_args=(), schema=_BACKWARD)
def _attention_backward(
    do, d_lse, q, k, v, out, lse, controlled_lse, phase, starts, extra, controlled, block_size, prefix, scale, alpha
):
    """Gradients of q, k, v and, in nats, of the scores of the extra place (B, H, T).

    d_lse: (B, H, T), float32, of the outer log-sum-exp in units of log 2, as `_attention` returns it. The first kernel
    writes D_i to `delta` and, where one kernel does the rest, zeros to `dq_sum`: each number is read once.
    """
    from landmark.attention.fused.kernels import backward_means

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_extra = torch.empty_like(lse if extra is not None else controlled_lse)
    per_sample = _per_sample(lse, phase, starts, extra, controlled_lse, controlled)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    shape = (*_shape(q, k, phase, controlled, prefix), scale * LOG2_E, scale)
    settings = {"block_size": block_size, "cmt": extra is not None, "alpha": alpha}
    settings["samples"] = None if starts is None else len(phase)
    in_one = is_in_one(q, block_size, cmt=extra is not None)
    delta = torch.empty_like(lse)
    dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device) if in_one else delta
    (batch, heads, rows, _), options = out.shape, means_constants(out.shape[3])
    tiles = -(-rows // options["M"])
    with on_device_of(out):
        backward_means[(batch * heads * tiles,)](
            *(out, do, d_lse.contiguous(), delta, dq_sum, *out.stride(), *do.stride()),
            *(rows, heads, tiles, LOG2_E),
            ALL=in_one,
            **options,
        )
    if not in_one:
        tensors = (q, k, v, do, delta, lse, dq, d_extra, *per_sample)
        launch("backward_queries", *tensors, *strides, *dq.stride(), *shape, over=q, **settings)
    tensors = (q, k, v, do, delta, lse, dk, dv, d_extra, dq_sum, *per_sample)
    kernel = "backward" if in_one else "backward_keys"
    launch(kernel, *tensors, *strides, *dk.stride(), *dv.stride(), *shape, over=k, **settings)
    if in_one:
        torch.mul(dq_sum, scale, out=dq)
    return dq, dk, dv, d_extra


def means_constants(dim: int) -> dict[str, Any]:
    """Compile-time constants of that kernel. dim: d, numbers of a head."""
    return {"D": dim, "BLOCK_D": padded(dim), "M": 32, "num_warps": 4, "num_stages": 1}


@_attention_backward.register_fake
def _(do, d_lse, q, k, v, out, lse, controlled_lse, phase, starts, extra, *_):
    d_extra = torch.empty_like(lse if extra is not None else controlled_lse)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_extra


def _keep(ctx, inputs, output) -> None:
    q, k, v, *per_sample = inputs[:7]
    ctx.numbers = inputs[7:]
    ctx.save_for_backward(q, k, v, *output, *per_sample)


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor, _):
    saved = ctx.saved_tensors  # activation checkpointing allows reading them once
    dq, dk, dv, d_extra = _attention_backward(grad_out, grad_lse, *saved, *ctx.numbers)
    return dq, dk, dv, None, None, d_extra if ctx.needs_input_grad[5] else None, *[None] * 5


_attention.register_autograd(_backward, setup_context=_keep)


def landmark_attention_fused(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention.

    Inputs are float32, bfloat16 or float16; sums are float32. Raises ValueError for inputs that the kernels cannot
    compute.
    """
    q, k, v, block_size = inputs.q, inputs.k, inputs.v, inputs.block_size
    if q.dtype not in DTYPES:
        raise ValueError(f"backend=triton: q must be of type {', '.join(map(str, DTYPES))}, got {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"backend=triton: q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if inputs.scale <= 0:
        raise ValueError(f"backend=triton: scale must be positive, got {inputs.scale}")
    if q.device.type == "cpu" and not is_interpreted():
        raise ValueError("backend=triton needs a GPU; to run it on a CPU, slowly, set TRITON_INTERPRET=1")
    if not can_launch(block_size, q.shape[3], q.element_size(), q.device):
        raise ValueError(
            f"backend=triton: blocks of {block_size} tokens with head dimension {q.shape[3]} in {q.dtype} do not fit "
            "into this GPU's shared memory and registers, or it is older than sm_80: use backend=blockwise"
        )
    dtype = q.dtype
    if is_interpreted() and dtype == torch.bfloat16:  # the interpreter does not support it
        q, k, v = q.float(), k.float(), v.float()
    phase, starts = inputs.phase.to(q.device, torch.int32, non_blocking=True), inputs.cu_seqlens
    starts = None if starts is None else starts.to(q.device, torch.int32, non_blocking=True)
    extra = None if inputs.extra is None else inputs.extra.float()
    controlled = None if inputs.controlled is None else inputs.controlled.to(torch.int8)
    numbers = block_size, inputs.prefix, inputs.scale, inputs.alpha
    out, lse, _ = _attention(q, k, v, phase, starts, extra, controlled, *numbers)
    return out.to(dtype), lse / LOG2_E
