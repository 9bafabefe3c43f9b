"""The paper's equations with explicit weights, O(T²) memory: what every other path is tested on (Section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.layout import blocks_and_landmarks


def grouped_softmax(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Softmax over the elements of each group separately (paper, σ_G); −∞ gets weight 0.

    scores: (…, S); groups: int64, broadcastable to scores, values 0…num_groups−1.
    """
    groups = groups.expand_as(scores)
    shape = (*scores.shape[:-1], num_groups)
    largest = scores.new_full(shape, -torch.inf).scatter_reduce(-1, groups, scores.detach(), "amax")
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    exponentials = (scores - largest.gather(-1, groups)).exp()
    sums = scores.new_zeros(shape).scatter_add(-1, groups, exponentials)
    return exponentials / sums.masked_fill(sums == 0, 1.0).gather(-1, groups)


def landmark_attention_weights(
    scores: Tensor,
    block_size: int,
    phase: Tensor,
    prefix: int = 0,
    bidirectional: bool = False,
    miss: Tensor | None = None,
    controlled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention weights of landmark attention, and the log-sum-exp of each query's own (outer) group.

    scores: (B, H, T, S), scaled, S = prefix + T; phase: (B,). Returns (B, H, T, S) and (B, H, T). Rows sum to one,
    but for the landmark of an empty first block, which has nothing to attend to: weights 0, log-sum-exp −∞.

    bidirectional: the variant of the paper's second reproduction. Nothing is hidden for coming later, and a landmark
    sees its own block and itself alone.

    miss: (B, H, T), scores of the context miss token, which joins the outer group (Appendix D). controlled:
    (B, blocks), bool: landmarks that make a group of their own, weighted by the weight of the context miss token.
    Where none of them is visible that weight goes nowhere.
    """
    queries, keys = scores.shape[-2:]
    phase = phase.to(scores.device)
    block, is_landmark = blocks_and_landmarks(phase, keys, block_size)
    block_i, block_j = block[:, None, prefix:, None], block[:, None, None, :]
    landmark_j = is_landmark[:, None, None, :]
    own_block = block_i == block_j
    index = torch.arange(keys, device=scores.device)
    causal = index[None, :] <= index[prefix:, None]
    empty = (phase == block_size)[:, None, None, None] & (block_j == 0)
    visible = causal & ~(landmark_j & own_block) & ~(landmark_j & empty)
    itself = torch.zeros_like(causal)
    if bidirectional:
        landmark_i = is_landmark[:, None, prefix:, None]
        itself = landmark_i & (index[None, :] == index[prefix:, None])
        visible = torch.where(landmark_i, own_block, ~(landmark_j & own_block))

    # G_ij: a normal token's own block; for the landmark of another block, the block of the query.
    num_groups = int(block.max()) + 1
    groups = torch.where(landmark_j, block_i, block_j)
    masked = scores.masked_fill(~visible, -torch.inf)
    if miss is None:
        softmax = grouped_softmax(masked, groups, num_groups)
        landmark_weights = softmax
    else:
        controlled_j = landmark_j & _of_keys(controlled, block)
        groups = torch.where(controlled_j, num_groups, groups).expand_as(scores)
        with_miss = torch.cat([masked, miss[..., None]], -1)
        its_group = block_i.expand_as(miss[..., None])
        softmax = grouped_softmax(with_miss, torch.cat([groups, its_group], -1), num_groups + 1)
        softmax, miss_weight = softmax[..., :-1], softmax[..., -1:]
        landmark_weights = torch.where(controlled_j, softmax * miss_weight, softmax)

    # S_{i,p_j}: the weight of the landmark that closes the block of key j, 1 for the query's own block.
    gates = scores.new_zeros(*scores.shape[:-1], num_groups)
    to_gate = block_j.expand_as(scores)
    gates = gates.scatter_add(-1, to_gate, landmark_weights.masked_fill(~landmark_j, 0.0))
    gate = gates.gather(-1, to_gate).masked_fill(own_block, 1.0)
    weights = (softmax * gate).masked_fill(landmark_j & ~itself, 0.0)

    outer = (groups == block_i).expand_as(scores)
    lse = masked.masked_fill(~outer, -torch.inf).logsumexp(-1).view(*scores.shape[:2], queries)
    return weights, lse if miss is None else torch.logaddexp(lse, miss)


def _of_keys(of_blocks: Tensor | None, block: Tensor) -> Tensor:
    """(B, blocks) → (B, 1, 1, S), for each key what is said of its block; None: of none."""
    if of_blocks is None:
        return torch.zeros((), dtype=torch.bool, device=block.device)
    return of_blocks.to(block.device).gather(1, block)[:, None, None, :]


def landmark_attention_reference(
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
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; autograd gives the gradients.

    q: (B, H, T, d); k, v: (B, H, prefix + T, d); phase: (B,); miss: (B, H, T), scores of a context miss
    token; controlled: (B, blocks).
    """
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    weights, lse = landmark_attention_weights(scores, block_size, phase, prefix, miss=miss, controlled=controlled)
    return torch.einsum("bhij,bhjd->bhid", weights, v), lse
