"""Attention in both directions (paper, Appendix F), with explicit weights: O(T²) memory."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.utils.window_batch import most_blocks


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of all queries (B, H, T, d) to all keys (B, H_kv, T, d): (B, H, T, d)."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])


def landmark_attention_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    phase: Tensor | None = None,
    *,
    alpha: float = 0.0,
    top_k: int | None = None,
) -> Tensor:
    """Landmark attention to earlier and later blocks, (B, H, T, d).

    A query attends to the tokens of its own block, and to other blocks, earlier or later, by the gates of their
    landmarks. A last block whose landmark is not in the window has no gate: only its own tokens see it.

    Args:
        q: (B, H, T, d), rotated.
        k, v: (B, H_kv, T, d), k rotated.
        block_size: ℓ, normal tokens of a block.
        phase: (B,), tokens missing from the first block (None: 0).
        alpha: share of a block's log-sum-exp in its gate.
        top_k: other blocks that a query attends to, those with the highest landmark scores, and ties (None: all).
    """
    width, length = block_size + 1, q.shape[2]
    blocks = most_blocks(length, block_size)
    phase = torch.zeros(len(q), dtype=torch.int64) if phase is None else phase
    # Whole blocks: place j of them is token j − phase of the window, or there is none.
    place = torch.arange(blocks * width, device=q.device) - phase.to(q.device)[:, None]
    is_there = ((place >= 0) & (place < length)).unflatten(1, (blocks, width))
    index = place.clamp(0, length - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1])
    k, v = (x.gather(2, index).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).unflatten(-1, (blocks, width))  # (B, H, T, blocks, W)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    own = (torch.arange(length, device=q.device) + phase.to(q.device)[:, None]) // width
    is_own = (own[..., None] == torch.arange(blocks, device=q.device))[:, None]  # (B, 1, T, blocks)
    has_gate = is_there[..., -1] & is_there[..., :-1].any(-1)
    tokens = scores[..., :-1].masked_fill(~is_there[:, None, None, :, :-1], -torch.inf)
    gates = scores[..., -1].masked_fill(is_own | ~has_gate[:, None, None], -torch.inf)
    if top_k is not None and blocks > top_k:
        gates = gates.masked_fill(gates < gates.topk(top_k, -1).values[..., -1:], -torch.inf)
    # Softmax of each block; one without tokens has no weight, and no gate.
    of_blocks = tokens.masked_fill(~is_there[..., :-1].any(-1)[:, None, None, :, None], 0.0)
    if alpha:
        gates = gates + alpha * of_blocks.logsumexp(-1)
    own_tokens = tokens.masked_fill(~is_own[..., None], -torch.inf).flatten(-2)
    outer = _softmax(torch.cat([own_tokens, gates], -1))
    own_weights, gates = outer.split([blocks * block_size, blocks], -1)
    weights = own_weights.unflatten(-1, (blocks, block_size)) + gates[..., None] * of_blocks.softmax(-1)
    return F.pad(weights, (0, 1)).flatten(-2).to(v.dtype) @ v


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; weights of 0 where all scores are −∞, as of a landmark alone in its window."""
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
