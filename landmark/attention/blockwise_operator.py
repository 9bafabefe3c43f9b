"""Blockwise landmark attention as one operator of a graph that `torch.compile` makes.

Its loops depend on the phases of the windows, which a graph does not hold. So the graph calls this operator, and the
operator the functions of blockwise.py. Its backward pass computes the forward pass again.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from landmark.attention.blockwise import _Blockwise, landmark_attention_blockwise
from landmark.attention.inputs import AttentionInputs
from landmark.attention.packed import one_by_one


def _attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    if inputs.cu_seqlens is None:
        return landmark_attention_blockwise(inputs)
    return one_by_one(landmark_attention_blockwise, inputs)


@torch.library.custom_op("landmark::blockwise", mutates_args=())
def _blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cmt_scores: Tensor | None,
    phase: Tensor,
    controlled: Tensor | None,
    cu_seqlens: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
    top_k: int | None,
    local_blocks: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T). The arguments are those of `AttentionInputs`."""
    with torch.no_grad():
        settings = block_size, phase, prefix, scale, cmt_scores, controlled, cu_seqlens, top_k
        settings = *settings, local_blocks, bidirectional
        out, lse = _attend(AttentionInputs(q, k, v, *settings))
    return out.contiguous(), lse.contiguous()


@_blockwise.register_fake
def _(q, k, v, cmt_scores, phase, controlled, cu_seqlens, block_size, prefix, scale, top_k, *_):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


class _Kept:
    """What `_Blockwise` keeps between its two passes; inside an operator there is no autograd to keep it."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None: ...

    def set_materialize_grads(self, _: bool) -> None: ...


@torch.library.custom_op("landmark::blockwise_backward", mutates_args=())
def _blockwise_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cmt_scores: Tensor | None,
    phase: Tensor,
    controlled: Tensor | None,
    cu_seqlens: Tensor | None,
    block_size: int,
    prefix: int,
    scale: float,
    top_k: int | None,
    local_blocks: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the context miss token's scores, which are empty where there are none."""
    tensors = [q, k, v, *([] if cmt_scores is None else [cmt_scores])]
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
    bounds = [0, q.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        rows = slice(None) if cu_seqlens is None else slice(start, end)
        document = slice(None) if cu_seqlens is None else slice(i, i + 1)
        parts = [x[:, :, rows].to(torch.promote_types(x.dtype, torch.float32)) for x in (grad_out, *tensors)]
        own = None if controlled is None else controlled[document]
        of_document = parts[4] if cmt_scores is not None else None, own, block_size, phase[document]
        kept = _Kept()
        sight = prefix, scale, top_k, local_blocks, bidirectional
        _Blockwise.forward(kept, parts[1], parts[2], parts[3], *of_document, *sight, None)
        for into, found in zip(gradients, _Blockwise.backward(kept, parts[0], None), strict=False):
            assert found is not None
            into[:, :, rows] = found
    dq, dk, dv, *d_cmt_scores = gradients
    return dq, dk, dv, d_cmt_scores[0] if d_cmt_scores else q.new_empty(0)


@_blockwise_backward.register_fake
def _(grad_out, q, k, v, cmt_scores, phase, controlled, cu_seqlens, block_size, prefix, scale, top_k, *_):
    d_cmt_scores = q.new_empty(0) if cmt_scores is None else cmt_scores.new_empty(cmt_scores.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_cmt_scores


def _keep(ctx, inputs, output) -> None:
    tensors, ctx.settings = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_out: Tensor, _):
    saved = ctx.saved_tensors  # activation checkpointing allows reading them once
    *gradients, d_cmt_scores = _blockwise_backward(grad_out.contiguous(), *saved, *ctx.settings)
    return *gradients, d_cmt_scores if ctx.needs_input_grad[3] else None, *[None] * 9


_blockwise.register_autograd(_backward, setup_context=_keep)


def landmark_attention_in_graph(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`landmark_attention_blockwise`, of packed documents too, as an operator.

    Returns the output (B, H, T, d) and, without gradient, the outer log-sum-exp (B, H, T).
    """
    q, k, v, block_size, phase, prefix, scale, cmt_scores, controlled, cu_seqlens, *sight, _, _ = inputs
    tensors = q, k, v, cmt_scores, phase, controlled, cu_seqlens
    out, lse = _blockwise(*tensors, block_size, prefix, scale, *sight)
    return out, lse.detach()
