"""Landmark attention fused into Triton kernels, as operators that `torch.compile` and autograd know.

The gradient of queries and that of keys and values have a kernel each, so that none adds to what another wrote; which
blocks begin where is read on the device, so that nothing waits for it. Keys and values of fewer heads are read as they
are. The kernels stand in fused_kernels.py.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and many numbers by strides.
# pyright: reportCallIssue=false
import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """Queries of a tile; blocks of a tile of keys, and columns of each; warps and pipeline stages of a program."""

    queries: int
    group: int
    segment: int
    warps: int
    stages: int


def tiles(kernel: str, block_size: int, dim: int, element_size: int) -> Tiles:
    """What a kernel can hold without spilling registers: about 64 keys at a time, more where a block is longer.

    Found by compiling for sm_80 and sm_90, half precision; wider numbers, heads and blocks take fewer queries.
    """
    segment = 1 << block_size.bit_length()  # the power of two from ℓ+1 up
    group = max(1, 64 // segment)
    load = max(1, group * segment // 64) * max(1, padded(dim) // 64) * max(1, element_size // 2)  # 1 at 64 × 64 halves
    if kernel == "backward_keys":
        return Tiles(max(16, 64 // load), group, segment, warps=8, stages=1)
    most = 256 if kernel == "forward" else 128
    return Tiles(max(16, min(128, most // load)), group, segment, warps=8, stages=2 if load <= 2 else 1)


def padded(dim: int) -> int:
    """The power of two that holds a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


def constants(chosen: Tiles, block_size: int, dim: int, dtype: torch.dtype) -> dict[str, int | str]:
    """What a kernel is compiled for, and how."""
    return {
        "W": block_size + 1,
        "D": dim,
        "BLOCK_D": padded(dim),
        "M": chosen.queries,
        "GROUP": chosen.group,
        "SEGMENT": chosen.segment,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }


@torch.library.custom_op("landmark::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phase: Tensor,
    shift: Tensor | None,
    nowhere: Tensor | None,
    controlled: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and log-sum-exp (B, H, T), in units of log 2.

    phase: (B,) int32. shift, nowhere: (B, H, T) float32, in units of log 2; controlled: (B, blocks) int8.
    """
    from landmark.attention import fused_kernels as kernels

    batch, heads, queries, dim = q.shape
    chosen = tiles("forward", block_size, dim, q.element_size())
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    absent = lse if shift is None else shift
    kernels.forward[(-(-queries // chosen.queries), batch * heads)](
        q,
        k,
        v,
        out,
        lse,
        phase,
        absent,
        absent if nowhere is None else nowhere,
        phase if controlled is None else controlled,
        *(*q.stride(), *k.stride(), *v.stride(), *out.stride()),
        0 if controlled is None else controlled.shape[1],
        queries,
        prefix,
        heads,
        heads // k.shape[1],
        scale * LOG2_E,
        CMT=shift is not None,
        **constants(chosen, block_size, dim, q.dtype),
    )
    return out, lse


@_attention.register_fake
def _(q, k, v, phase, shift, nowhere, controlled, block_size, prefix, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("landmark::attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    phase: Tensor,
    shift: Tensor | None,
    controlled: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the shift (in nats), and D_i = do·out, (B, H, T)."""
    from landmark.attention import fused_kernels as kernels

    batch, heads, queries, dim = q.shape
    delta = (do.float() * out.float()).sum(-1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_shift = torch.empty_like(delta)
    absent = lse if shift is None else shift
    held = phase if controlled is None else controlled
    blocks = 0 if controlled is None else controlled.shape[1]
    inputs = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    sizes = (blocks, queries, prefix, heads, heads // k.shape[1], scale * LOG2_E, scale)
    chosen = tiles("backward_queries", block_size, dim, q.element_size())
    settings = {"CMT": shift is not None, **constants(chosen, block_size, dim, q.dtype)}
    kernels.backward_queries[(-(-queries // chosen.queries), batch * heads)](
        *(q, k, v, do, delta, lse, dq, d_shift, phase, absent, held), *inputs, *dq.stride(), *sizes, **settings
    )
    chosen = tiles("backward_keys", block_size, dim, q.element_size())
    settings |= constants(chosen, block_size, dim, q.dtype)
    most_blocks = (prefix + queries + 2 * block_size) // (block_size + 1)
    kernels.backward_keys[(-(-most_blocks // chosen.group), batch * k.shape[1])](
        *(q, k, v, do, delta, lse, dk, dv, phase, absent, held),
        *(*inputs, *dk.stride(), *dv.stride()),
        *sizes,
        **settings,
    )
    return dq, dk, dv, d_shift, delta


@_attention_backward.register_fake
def _(do, q, k, v, out, lse, phase, shift, controlled, block_size, prefix, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse), torch.empty_like(lse)


def _keep(ctx, inputs, output) -> None:
    q, k, v, phase, shift, nowhere, controlled, ctx.block_size, ctx.prefix, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, phase, shift, nowhere, controlled)


def _backward(ctx, grad_out: Tensor, _grad_lse: Tensor | None):
    q, k, v, out, lse, phase, shift, nowhere, controlled = ctx.saved_tensors
    sizes = (ctx.block_size, ctx.prefix, ctx.scale)
    dq, dk, dv, d_shift, delta = _attention_backward(grad_out, q, k, v, out, lse, phase, shift, controlled, *sizes)
    if shift is None:
        return dq, dk, dv, *[None] * 7
    d_nowhere = torch.where(nowhere == -torch.inf, 0.0, -delta * torch.exp2(nowhere - lse))
    return dq, dk, dv, None, d_shift / LOG2_E, d_nowhere / LOG2_E, *[None] * 4


_attention.register_autograd(_backward, setup_context=_keep)


def landmark_attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    phase: Tensor,
    prefix: int,
    scale: float,
    miss: Tensor | None,
    controlled: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; the latter carries no gradient.

    q: (B, H, T, d); k, v: (B, H_kv, prefix + T, d), H_kv dividing H; phase: (B,); miss: (B, H, T), scores of a context
    miss token; controlled: (B, blocks), given with it. float32, bfloat16 or float16, computed in float32.
    """
    if q.dtype not in DTYPES:
        raise ValueError(f"backend=triton: computes {', '.join(map(str, DTYPES))}, got {q.dtype}")
    interpreted, dtype = os.environ.get("TRITON_INTERPRET") == "1", q.dtype
    if q.device.type == "cpu" and not interpreted:
        raise ValueError("backend=triton: needs a GPU, or TRITON_INTERPRET=1 to be interpreted, slowly, on a CPU")
    if interpreted and dtype == torch.bfloat16:  # which the interpreter does not know
        q, k, v = q.float(), k.float(), v.float()
    on_device = phase.to(q.device, torch.int32, non_blocking=True)
    shift = nowhere = held = None
    if miss is not None and controlled is not None:
        shared = _logsumexp_of_controlled(q, k, controlled, on_device, block_size, prefix, scale)
        unseen = shared == -torch.inf
        shift = torch.where(unseen, 0.0, miss - shared.masked_fill(unseen, 0.0)).float() * LOG2_E
        nowhere = torch.where(unseen, miss, -torch.inf).float() * LOG2_E
        held = controlled.to(torch.int8)
    out, lse = _attention(q, k, v, on_device, shift, nowhere, held, block_size, prefix, scale)
    return out.to(dtype), (lse / LOG2_E).detach()


def _logsumexp_of_controlled(
    q: Tensor, k: Tensor, controlled: Tensor, phase: Tensor, block_size: int, prefix: int, scale: float
) -> Tensor:
    """(B, H, T), log Σ exp of the scores of the controlled landmarks that each query sees, −∞ where it sees none."""
    width, length = block_size + 1, k.shape[2]
    blocks = torch.arange(controlled.shape[1], device=q.device)
    at = blocks * width + block_size - phase[:, None]  # (B, blocks), keys of the landmarks
    index = at.clamp(0, length - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    landmarks = k.gather(2, index.long()).repeat_interleave(q.shape[1] // k.shape[1], 1)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bhtd,bhnd->bhtn", q.float(), landmarks.float()) * scale
    own = (phase[:, None] + prefix + torch.arange(q.shape[2], device=q.device)) // width
    empty = (phase[:, None] == block_size) & (blocks == 0)
    seen = (controlled & ~empty & (at < length))[:, None, None] & (blocks < own[..., None])[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    none = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(none, 0.0).logsumexp(-1).masked_fill(none.squeeze(-1), -torch.inf)
