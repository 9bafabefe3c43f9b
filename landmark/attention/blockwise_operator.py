"""Blockwise landmark attention as one operator of a graph that `torch.compile` makes.

Its loops depend on the phases of the windows, which a graph does not hold. So the graph calls this operator, and the
operator the functions of blockwise.py. Its backward pass computes the forward pass again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from landmark.attention import blockwise
from landmark.attention.inputs import AttentionInputs

_INPUTS = 7  # of `AttentionInputs`, the tensors come first; four of them have gradients
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? extra, Tensor phase, Tensor? controlled, Tensor? cu_seqlens, "
    "int block_size, int prefix, float scale, float? softcap, int? top_k, float alpha"
)


@torch.library.custom_op("landmark::blockwise", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _blockwise(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T). The arguments are those of `AttentionInputs`."""
    with torch.no_grad():
        out, lse = AttentionInputs(*arguments).one_by_one(blockwise.landmark_attention_blockwise)
    return out.contiguous(), lse.contiguous()


@_blockwise.register_fake
def _(q, *_):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


@torch.library.custom_op(
    "landmark::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _blockwise_backward(grad_out: Tensor, grad_lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and extra; those of inputs that are not there are empty."""
    inputs = AttentionInputs(*arguments)
    whole = [_empty(x, inputs.q, torch.zeros_like) for x in inputs[:4]]
    for rows, own in inputs.documents():
        own = own.to(torch.promote_types(own.q.dtype, torch.float32))
        kept = blockwise.forward(own)[2]
        do, d_lse = grad_out[:, :, rows].to(own.q.dtype), grad_lse[:, :, rows]
        for into, gradient in zip(whole, blockwise.backward(own, kept, do, d_lse), strict=True):
            if gradient is not None:
                into[:, :, rows] = gradient
    return tuple(whole)


def _empty(x: Tensor | None, like: Tensor, make: Any) -> Tensor:
    return like.new_empty(0) if x is None else make(x, memory_format=torch.contiguous_format)


@_blockwise_backward.register_fake
def _(_, __, *arguments):
    return tuple(_empty(x, arguments[0], torch.empty_like) for x in arguments[:4])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:_INPUTS])
    ctx.numbers = inputs[_INPUTS:]


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor):
    saved = ctx.saved_tensors  # activation checkpointing allows reading them once
    gradients = _blockwise_backward(grad_out.contiguous(), grad_lse.contiguous(), *saved, *ctx.numbers)
    wanted = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False))
    return *wanted, *[None] * (len(AttentionInputs._fields) - len(gradients))


_blockwise.register_autograd(_backward, setup_context=_keep)


def landmark_attention_in_graph(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`landmark_attention_blockwise`, of packed documents too, as an operator: (B, H, T, d) and (B, H, T)."""
    return _blockwise(*inputs)
