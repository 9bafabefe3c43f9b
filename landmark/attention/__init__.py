"""Landmark attention as a function of tensors (Mohtashami & Jaggi 2023, Section 3.1)."""

from __future__ import annotations

import math
from typing import Literal, overload

from torch import Tensor

from landmark.attention.blockwise import landmark_attention_blockwise
from landmark.attention.context_miss import miss_scores
from landmark.attention.fused import landmark_attention_fused
from landmark.attention.layout import check_controlled, check_phase
from landmark.attention.reference import landmark_attention_reference

__all__ = ["BACKENDS", "landmark_attention"]

BACKENDS = {
    "auto": landmark_attention_blockwise,
    "blockwise": landmark_attention_blockwise,
    "reference": landmark_attention_reference,
    "triton": landmark_attention_fused,
}


@overload
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    phase: Tensor | None = ...,
    prefix: int = ...,
    cmt: Tensor | None = ...,
    controlled: Tensor | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    phase: Tensor | None = ...,
    prefix: int = ...,
    cmt: Tensor | None = ...,
    controlled: Tensor | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    phase: Tensor | None = None,
    prefix: int = 0,
    cmt: Tensor | None = None,
    controlled: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention in which the landmark that closes a block gates the attention to it (Section 3.1).

    A window holds a landmark after every `block_size` normal tokens. A query attends to the tokens of its own block
    and, each weighted by its landmark's score, to those of earlier blocks. A landmark's own weight is always 0.

    q: (B, H, T, d), already rotated. k, v: (B, H_kv, prefix + T, d), H_kv dividing H: the queries are those of the
    last T keys. phase: (B,) tokens missing from the first block, 0…block_size (None: 0),
    best on the CPU, whatever the device. cmt: (H_kv, d), the rotated key of a context miss token (Appendix D), which
    no window position stands for and whose value is never used. controlled: (B, blocks), bool, for each block of the
    window whether its landmark is controlled by that token (None: none is), at least as many as there are; see
    context_miss.py. scale: of the scores
    (None: 1/√d). backend: "reference" (explicit weights), "blockwise", "triton" (fused kernels, for GPUs) or "auto"
    (blockwise).

    Returns (B, H, T, d), and with `return_lse` also the (B, H, T) log-sum-exp, in nats and without gradient, of each
    query's outer softmax: over the tokens of its block, the earlier landmarks that are free, and the context miss
    token. A window that starts on a landmark (phase = block_size) has an empty first block: that landmark outputs 0.

    Raises ValueError for shapes that do not fit, a phase outside 0…block_size, controlled landmarks without a context
    miss token, or an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    batch, heads, queries, dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2] != prefix + queries or k.shape[3] != dim:
        raise ValueError(
            f"k and v must have shape ({batch}, heads, prefix + T = {prefix + queries}, {dim}), "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if heads % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {heads} query heads")
    phase = check_phase(phase, batch, block_size)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    miss = None
    if cmt is not None:
        miss = miss_scores(q, cmt, k.shape[1]) * scale
        controlled = check_controlled(controlled, batch, prefix + queries, block_size).to(q.device)
    elif controlled is not None:
        raise ValueError("controlled landmarks need a context miss token: pass its key as cmt")
    if k.shape[1] != heads and backend != "triton":
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    out, lse = BACKENDS[backend](q, k, v, block_size, phase, prefix, scale, miss, controlled)
    return (out, lse) if return_lse else out
