"""Landmark attention as the paper writes it (Section 3.1): explicit weights, O(T²) memory.

All other implementations are tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.hierarchy import Hierarchy, landmark_scores
from landmark.attention.inputs import AttentionInputs
from landmark.attention.layout import blocks_and_landmarks
from landmark.attention.softcap import capped
from landmark.attention.top_k import keep_best


def grouped_softmax(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Softmax of each group of elements separately, σ_G in the paper; elements of −∞ get weight 0.

    scores: (…, S). groups: int64, broadcastable to scores, 0…num_groups−1: the group of each element.
    """
    exponentials, sums, _ = _exponentials(scores, groups, num_groups)
    return exponentials / sums.masked_fill(sums == 0, 1.0).gather(-1, groups.expand_as(scores))


def grouped_logsumexp(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Log-sum-exp of each group of elements, (…, num_groups); −∞ for a group without elements above −∞.

    Args: as in `grouped_softmax`.
    """
    _, sums, largest = _exponentials(scores, groups, num_groups)
    return (largest + sums.masked_fill(sums == 0, 1.0).log()).masked_fill(sums == 0, -torch.inf)


def _exponentials(scores: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score − largest of its group) (…, S), and of each group their sum and the largest score, (…, num_groups)."""
    groups = groups.expand_as(scores)
    shape = (*scores.shape[:-1], num_groups)
    largest = scores.new_full(shape, -torch.inf).scatter_reduce(-1, groups, scores.detach(), "amax")
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    exponentials = (scores - largest.gather(-1, groups)).exp()
    return exponentials, scores.new_zeros(shape).scatter_add(-1, groups, exponentials), largest


def landmark_attention_weights(
    scores: Tensor,
    block_size: int,
    phase: Tensor,
    prefix: int = 0,
    cmt_scores: Tensor | None = None,
    controlled: Tensor | None = None,
    top_k: int | None = None,
    local_blocks: int = 0,
    bidirectional: bool = False,
    landmarks_see_own_block: bool = False,
    gates: Tensor | None = None,
    empty: Tensor | None = None,
    landmark_values: bool = False,
    joint_softmax: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weights of landmark attention, AttWeight in the paper, and the log-sum-exp of each query's own (outer) group.

    Args:
        scores: (B, H, T, S), scaled, S = prefix + T.
        block_size: ℓ, normal tokens of a block.
        phase: (B,), tokens missing from the first block.
        prefix: keys before the first query.
        cmt_scores: (B, H, T), scores of the context miss token, which joins the outer group (Appendix D); None: there
            is no such token.
        controlled: (B, blocks), bool, landmarks that the context miss token controls: they form one more group, whose
            weights are multiplied by the token's weight. A query that sees none of them loses that weight. None: no
            landmark is controlled.
        top_k: gated blocks that a query attends to, those whose landmarks have the highest scores; None: all.
        local_blocks: blocks before the query's own, and without causality after it too, whose tokens are in its own
            group: no landmark gates them.
        bidirectional: whether later tokens are visible too (Appendix F). A last block without its landmark, as the
            window ends before it, is then seen by its own tokens and where it is local.
        landmarks_see_own_block: whether a landmark sees only its own block and itself: with `bidirectional` the
            variant of the second reproduction of the paper.
        gates: (B, H, T, blocks or more), scores of the landmarks in place of those at their keys; None: these.
        empty: (B, S), bool, places without a token, to which nothing attends; None: there are none.
        landmark_values: whether the landmarks of blocks that top_k leaves out keep their weight, for their own values.
        joint_softmax: how much of a block's log-sum-exp is added to its landmark's score. 0: nothing, as in the paper;
            1: one softmax is over all tokens, to whose scores those of their landmarks are added.

    Returns (B, H, T, S) and (B, H, T). Rows of weights sum to one, with two exceptions: a row that loses the weight of
    the context miss token, and rows of the landmark and the empty places of a first block without tokens (weights 0,
    log-sum-exp −∞).
    """
    queries, keys = scores.shape[-2:]
    phase = phase.to(scores.device)
    block, is_landmark = blocks_and_landmarks(phase, keys, block_size)
    block_i, block_j = block[:, None, prefix:, None], block[:, None, None, :]
    landmark_j = is_landmark[:, None, None, :]
    local = (block_i >= block_j) & (block_i - block_j <= local_blocks)
    if bidirectional:
        local = (block_i - block_j).abs() <= local_blocks
    index = torch.arange(keys, device=scores.device)
    reached = (index[None, :] <= index[prefix:, None]) | bidirectional
    holds_token = ~is_landmark if empty is None else ~is_landmark & ~empty
    tokens = torch.zeros_like(block).scatter_add(1, block, holds_token.to(block.dtype))  # of each block, by its number
    without_tokens = (tokens.gather(1, block) == 0)[:, None, None, :]
    visible = reached & ~(landmark_j & local) & ~(landmark_j & without_tokens)
    if empty is not None:
        visible = visible & ~empty[:, None, None, :]
    itself = torch.zeros_like(reached)
    if landmarks_see_own_block:
        landmark_i = is_landmark[:, None, prefix:, None]
        itself = landmark_i & (index[None, :] == index[prefix:, None])
        visible = torch.where(landmark_i, block_i == block_j, visible)

    # G_ij: a normal token is in the group of its block, or of the query where it is local; the landmark of another
    # block is in the group of the query.
    num_groups = int(block.max()) + 1
    if gates is not None:
        scores = torch.where(landmark_j, gates.gather(-1, block_j.expand_as(scores)), scores)
    groups = torch.where(landmark_j | local, block_i, block_j)
    masked = scores.masked_fill(~visible, -torch.inf)
    read = torch.zeros_like(masked, dtype=torch.bool)  # landmarks that are read in place of their blocks
    if top_k is not None:
        landmarks = keep_best(masked.masked_fill(~landmark_j, -torch.inf), top_k, -1)
        if landmark_values:
            read = landmark_j & (landmarks == -torch.inf) & (masked > -torch.inf)
        else:
            masked = torch.where(landmark_j, landmarks, masked)
    if joint_softmax:
        of_block = grouped_logsumexp(masked.masked_fill(landmark_j, -torch.inf), block_j, num_groups)
        added = joint_softmax * of_block.gather(-1, block_j.expand_as(scores))
        masked = torch.where(landmark_j & (masked > -torch.inf), masked + added, masked)
    if cmt_scores is None:
        softmax = grouped_softmax(masked, groups, num_groups)
        landmark_weights = softmax
    else:
        controlled_j = landmark_j & _per_key(controlled, block)
        groups = torch.where(controlled_j, num_groups, groups).expand_as(scores)
        with_cmt = torch.cat([masked, cmt_scores[..., None]], -1)
        cmt_group = block_i.expand_as(cmt_scores[..., None])
        softmax = grouped_softmax(with_cmt, torch.cat([groups, cmt_group], -1), num_groups + 1)
        softmax, cmt_weight = softmax[..., :-1], softmax[..., -1:]
        landmark_weights = torch.where(controlled_j, softmax * cmt_weight, softmax)

    # S_{i,p_j}: the weight of the landmark that closes the block of key j; 1 where key j is local.
    gates = scores.new_zeros(*scores.shape[:-1], num_groups)
    to_gate = block_j.expand_as(scores)
    gates = gates.scatter_add(-1, to_gate, landmark_weights.masked_fill(~landmark_j | read, 0.0))
    gate = gates.gather(-1, to_gate).masked_fill(local, 1.0)
    weights = (softmax * gate).masked_fill(landmark_j & ~itself, 0.0)
    weights = torch.where(read, landmark_weights, weights)

    outer = (groups == block_i).expand_as(scores)
    lse = masked.masked_fill(~outer, -torch.inf).logsumexp(-1).view(*scores.shape[:2], queries)
    return weights, lse if cmt_scores is None else torch.logaddexp(lse, cmt_scores)


def product_of_gates(scores: Tensor, own: Tensor, hierarchy: Hierarchy) -> Tensor:
    """Scores of blocks that have, in one softmax, the weights of a hierarchy (hierarchy.py), by loops over its nodes.

    Args:
        scores: (B, H, T, blocks), of landmarks, −∞ where a query does not see them.
        own: (B, T), the number of each query's own block.
        hierarchy: with a bias for each of H heads.

    Returns (B, H, T, blocks): the score of a block's largest complete node, which takes part in the outer softmax, plus
    the logarithm of the product of the gates from there down to the block.
    """
    fan_out, bias = hierarchy
    levels, seen = [scores], scores > -torch.inf
    for of_level in bias:
        groups = levels[-1].split(fan_out, -1)
        levels.append(torch.stack([_mean_seen(group) for group in groups], -1) + of_level[:, None, None])
    adjusted = []
    for block in range(scores.shape[-1]):
        outer, product = scores[..., block], torch.ones_like(scores[..., block])
        for level in range(1, len(levels)):
            node = block // fan_out ** (level - 1)
            group = node // fan_out
            complete = (group < own // fan_out**level)[:, None]
            among = levels[level - 1].split(fan_out, -1)[group]
            gate = grouped_softmax(among, torch.zeros_like(among, dtype=torch.int64), 1)[..., node % fan_out]
            product = torch.where(complete, product * gate, product)
            outer = torch.where(complete, levels[level][..., group], outer)
        product = product.masked_fill(~seen[..., block], 1.0)
        adjusted.append((outer + product.log()).masked_fill(~seen[..., block], -torch.inf))
    return torch.stack(adjusted, -1)


def _mean_seen(scores: Tensor) -> Tensor:
    """Mean over the last dimension of the scores that are not −∞; 0 where there is none."""
    seen = scores > -torch.inf
    return scores.masked_fill(~seen, 0.0).sum(-1) / seen.sum(-1).clamp(min=1)


def _per_key(per_block: Tensor | None, block: Tensor) -> Tensor:
    """The value of each key's block: (B, blocks), bool → (B, 1, 1, S). None: False."""
    if per_block is None:
        return torch.zeros((), dtype=torch.bool, device=block.device)
    return per_block.to(block.device).gather(1, block)[:, None, None, :]


def landmark_attention_reference(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; autograd gives the gradients."""
    q, k, v, block_size, phase, prefix, scale, cmt_scores, controlled, *_ = inputs
    scores = capped(torch.einsum("bhid,bhjd->bhij", q, k) * scale, inputs.softcap)
    cmt_scores = None if cmt_scores is None else cmt_scores.to(scores.dtype)
    gates, sight = inputs.gates, (inputs.top_k, inputs.local_blocks, inputs.bidirectional)
    if inputs.hierarchy is not None:
        of_landmarks, own = landmark_scores(q, k, block_size, phase, prefix, scale)
        gates = product_of_gates(of_landmarks, own, inputs.hierarchy)
    weights, lse = landmark_attention_weights(
        scores,
        block_size,
        phase,
        prefix,
        cmt_scores,
        controlled,
        *sight,
        gates=gates,
        empty=inputs.empty,
        landmark_values=inputs.landmark_values,
        joint_softmax=inputs.joint_softmax,
    )
    return torch.einsum("bhij,bhjd->bhid", weights, v), lse
