"""The checked inputs of landmark attention, as every backend gets them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from landmark.attention.hierarchy import Hierarchy


class AttentionInputs(NamedTuple):
    """The arguments of `landmark.attention.landmark_attention`, checked and with their defaults filled in.

    q: (B, H, T, d), rotated.
    k, v: (B, H_kv, prefix + T, d). The backend "triton" takes H_kv that divides H; the others get H_kv = H.
    block_size: ℓ, normal tokens of a block.
    phase: (samples,), int64, tokens missing from the first block.
    prefix: keys before the first query.
    scale: factor of the scores.
    cmt_scores: (B, H, T), scores of the context miss token, scaled, in nats; None: the model has no such token.
    controlled: (samples, blocks), bool, landmarks that the token controls; None exactly where cmt_scores is None.
    cu_seqlens: (samples + 1,), the rows where packed samples begin and end; None: each element of the batch is one
        sample.
    top_k: gated blocks that a query attends to, those with the highest scores; None: all. Not for "triton".
    local_blocks: blocks beside a query's own whose tokens it sees without their landmarks. Not for "triton".
    bidirectional: whether a query sees later blocks too. Not for "triton".
    softcap: cap of the scores, in nats (softcap.py); None: there is none. Not for "triton".
    hierarchy: groups of landmarks, with a bias for each of H heads; None: there are none. Not for "triton".
    gates: (B, H, T, blocks), scores that take the place of those of the landmarks; None: these. Not for "triton".
    empty: (B, prefix + T), bool, places without a token, to which nothing attends; None: there are none. Not for
        "triton".
    landmark_values: whether blocks that top_k leaves out are read by the values of their landmarks (top_k.py).
    joint_softmax: how much of a block's log-sum-exp is added to its landmark's score.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_size: int
    phase: Tensor
    prefix: int
    scale: float
    cmt_scores: Tensor | None = None
    controlled: Tensor | None = None
    cu_seqlens: Tensor | None = None
    top_k: int | None = None
    local_blocks: int = 0
    bidirectional: bool = False
    softcap: float | None = None
    hierarchy: Hierarchy | None = None
    gates: Tensor | None = None
    empty: Tensor | None = None
    landmark_values: bool = False
    joint_softmax: float = 0.0


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that an enclosing `torch.autocast` computes attention in; without one, as they are.

    Rotary positions and norms return float32 under autocast, projections half precision. As for PyTorch's own
    attention, all become one type; float64 is left alone.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """A context in which the operations on the tensor's device compute in the types of their arguments."""
    return torch.autocast(like.device.type, enabled=False)
