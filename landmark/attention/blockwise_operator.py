"""Blockwise landmark attention as one operator of a graph that `torch.compile` makes.

Its loops depend on the phases of the windows, which a graph does not hold. So the graph calls this operator, and the
operator the functions of blockwise.py. Its backward pass computes the forward pass again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from landmark.attention.blockwise import _Blockwise, landmark_attention_blockwise
from landmark.attention.inputs import AttentionInputs
from landmark.attention.packed import documents, one_by_one

_TENSORS = ("q", "k", "v", "cmt_scores", "phase", "controlled", "cu_seqlens")  # autograd keeps them
_NUMBERS = ("block_size", "prefix", "scale", "top_k", "local_blocks", "bidirectional", "softcap")
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cmt_scores, Tensor phase, Tensor? controlled, Tensor? cu_seqlens, "
    "int block_size, int prefix, float scale, int? top_k, int local_blocks, bool bidirectional, "
    "float? softcap"
)


def _inputs(arguments: tuple[Any, ...]) -> AttentionInputs:
    return AttentionInputs(**dict(zip(_TENSORS + _NUMBERS, arguments, strict=True)))


@torch.library.custom_op("landmark::blockwise", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _blockwise(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T). The arguments are those of `AttentionInputs`."""
    with torch.no_grad():
        out, lse = one_by_one(landmark_attention_blockwise, _inputs(arguments))
    return out.contiguous(), lse.contiguous()


@_blockwise.register_fake
def _(q, *_):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


class _Kept:
    """What `_Blockwise` keeps between its two passes; inside an operator there is no autograd to keep it."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None: ...

    def set_materialize_grads(self, _: bool) -> None: ...


@torch.library.custom_op(
    "landmark::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _blockwise_backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the context miss token's scores, which are empty where there are none."""
    inputs = _inputs(arguments)
    tensors = [inputs.q, inputs.k, inputs.v, *([] if inputs.cmt_scores is None else [inputs.cmt_scores])]
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
    for rows, own in documents(inputs):
        compute = torch.promote_types(own.q.dtype, torch.float32)
        cmt_scores = None if own.cmt_scores is None else own.cmt_scores.to(compute)
        kept = _Kept()
        numbers = own.block_size, own.phase, own.prefix, own.scale, own.top_k
        sight = own.local_blocks, own.bidirectional, own.softcap
        q, k, v = (x.to(compute) for x in (own.q, own.k, own.v))
        _Blockwise.forward(kept, q, k, v, cmt_scores, own.controlled, *numbers, *sight, None)
        found = _Blockwise.backward(kept, grad_out[:, :, rows].to(compute), None)
        for into, gradient in zip(gradients, found, strict=False):
            assert gradient is not None
            into[:, :, rows] = gradient
    dq, dk, dv, *d_cmt_scores = gradients
    return dq, dk, dv, d_cmt_scores[0] if d_cmt_scores else inputs.q.new_empty(0)


@_blockwise_backward.register_fake
def _(_, q, k, v, cmt_scores, *__):
    d_cmt_scores = q.new_empty(0) if cmt_scores is None else cmt_scores.new_empty(cmt_scores.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_cmt_scores


def _keep(ctx, inputs, output) -> None:
    tensors, ctx.numbers = inputs[: len(_TENSORS)], inputs[len(_TENSORS) :]
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_out: Tensor, _):
    saved = ctx.saved_tensors  # activation checkpointing allows reading them once
    *gradients, d_cmt_scores = _blockwise_backward(grad_out.contiguous(), *saved, *ctx.numbers)
    others = len(_TENSORS + _NUMBERS) - 4
    return *gradients, d_cmt_scores if ctx.needs_input_grad[3] else None, *[None] * others


_blockwise.register_autograd(_backward, setup_context=_keep)


def landmark_attention_in_graph(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`landmark_attention_blockwise`, of packed documents too, as an operator.

    Returns the output (B, H, T, d) and, without gradient, the outer log-sum-exp (B, H, T).
    """
    out, lse = _blockwise(*(getattr(inputs, name) for name in _TENSORS + _NUMBERS))
    return out, lse.detach()
