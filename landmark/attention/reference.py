"""Landmark attention as the paper writes it (Section 3.1): explicit weights, O(T²) memory.

All other implementations are tested against this one.
"""

import torch
from torch import Tensor

from landmark.attention.layout import AttentionInputs, blocks_and_landmarks
from landmark.attention.scoring import capped


def grouped_softmax(scores: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Softmax of each group of scores (…, S) separately, σ_G in the paper, and the log-sum-exps (…, num_groups).

    Elements of −∞ get weight 0; a group without others has the log-sum-exp −∞.
    """
    groups = groups.expand_as(scores)
    shape = (*scores.shape[:-1], num_groups)
    largest = scores.new_full(shape, -torch.inf).scatter_reduce(-1, groups, scores.detach(), "amax")
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    exponentials = (scores - largest.gather(-1, groups)).exp()
    sums = scores.new_zeros(shape).scatter_add(-1, groups, exponentials)
    total = sums.masked_fill(sums == 0, 1.0)
    return exponentials / total.gather(-1, groups), (largest + total.log()).masked_fill(sums == 0, -torch.inf)


def landmark_attention_weights(
    scores: Tensor, inputs: AttentionInputs, causal: bool = True, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Weights of landmark attention, AttWeight in the paper, and the log-sum-exp of each query's own (outer) group.

    scores: (B, H, T, S), scaled. top_k: of the other blocks, a query sees those with the best landmarks; None: all.
    Rows of weights sum to one, with two exceptions: a row that loses the weight of the place without a value, and the
    row of the landmark of a first block without tokens (weights 0, log-sum-exp −∞).
    """
    queries, keys = scores.shape[-2:]
    prefix, phase = inputs.prefix, inputs.phase.to(scores.device)
    block, is_landmark = blocks_and_landmarks(phase, keys, inputs.block_size)
    block_i, block_j = block[:, None, prefix:, None], block[:, None, None, :]
    landmark_j = is_landmark[:, None, None, :]
    own = block_i == block_j
    index = torch.arange(keys, device=scores.device)
    holds_nothing = is_landmark & (index == 0)  # the landmark of a block whose tokens are all before the window
    visible = ~(landmark_j & own) & ~holds_nothing[:, None, None, :]
    if causal:
        visible = visible & (index <= index[prefix:, None])

    # G_ij: a normal token is in the group of its block; the landmark of another block is in the group of the query.
    num_groups = int(block.max()) + 1
    groups = torch.where(landmark_j, block_i, block_j)
    masked = scores.masked_fill(~visible, -torch.inf)
    if top_k is not None and top_k < keys:
        landmarks = masked.masked_fill(~landmark_j, -torch.inf)
        least = landmarks.topk(top_k, -1).values[..., -1:]
        masked = masked.masked_fill(landmark_j & (landmarks < least), -torch.inf)
    if inputs.alpha:
        block_lse = grouped_softmax(masked.masked_fill(landmark_j, -torch.inf), block_j, num_groups)[1]
        added = inputs.alpha * block_lse.gather(-1, block_j.expand_as(scores))
        masked = torch.where(landmark_j & (masked > -torch.inf), masked + added, masked)
    if inputs.extra is None or inputs.controlled is None:
        softmax, _ = grouped_softmax(masked, groups, num_groups)
        landmark_weights = softmax
    else:
        # One more group for the landmarks that share the weight of the place without a value (Appendix D).
        controlled_j = landmark_j & inputs.controlled.to(block.device).gather(1, block)[:, None, None, :]
        groups = torch.where(controlled_j, num_groups, groups).expand_as(scores)
        with_extra = torch.cat([masked, inputs.extra[..., None]], -1)
        extra_group = block_i.expand_as(inputs.extra[..., None])
        softmax, _ = grouped_softmax(with_extra, torch.cat([groups, extra_group], -1), num_groups + 1)
        softmax, extra_weight = softmax[..., :-1], softmax[..., -1:]
        landmark_weights = torch.where(controlled_j, softmax * extra_weight, softmax)

    # S_{i,p_j}: the weight of the landmark that closes the block of key j; 1 where key j is in the query's own block.
    gates = scores.new_zeros(*scores.shape[:-1], num_groups)
    to_gate = block_j.expand_as(scores)
    gates = gates.scatter_add(-1, to_gate, landmark_weights.masked_fill(~landmark_j, 0.0))
    weights = (softmax * gates.gather(-1, to_gate).masked_fill(own, 1.0)).masked_fill(landmark_j, 0.0)

    outer = (groups == block_i).expand_as(scores)
    lse = masked.masked_fill(~outer, -torch.inf).logsumexp(-1).view(*scores.shape[:2], queries)
    return weights, lse if inputs.extra is None else torch.logaddexp(lse, inputs.extra)


def landmark_attention_reference(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; autograd gives the gradients."""
    scores = capped(torch.einsum("bhid,bhjd->bhij", inputs.q, inputs.k) * inputs.scale, inputs.softcap)
    extra = None if inputs.extra is None else inputs.extra.to(scores.dtype)
    weights, lse = landmark_attention_weights(scores, inputs._replace(extra=extra))
    return torch.einsum("bhij,bhjd->bhid", weights, inputs.v), lse
