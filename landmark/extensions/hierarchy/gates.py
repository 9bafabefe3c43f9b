"""A hierarchy of landmarks: groups of m blocks have a gate too, and so have groups of m groups.

Symbols: m = `fan_out`; level 0 are the blocks, level l+1 the groups of m consecutive nodes of level l, counted from the
first block of the window. s⁰_b is the score of a block's landmark. A group's key is the mean of its m nodes' keys, as a
landmark's key can be the mean of its block's keys (`landmark.attention.keys`), and has a bias of its level, at first
log m. So

    s_G = mean of s_n over the nodes n of G, plus the bias,

and no token is added to the text. A group is *complete* for a query if the query's own block comes after it. The outer
softmax of a query is over the tokens of its own block and the largest complete nodes, those in no complete group. The
weight of a token is the product along its way: gate of the group × gate among the m nodes of the group × … × weight
among the tokens of the block. A block weighs as in one outer softmax over blocks with the *adjusted* score

    s'_b = s'_G + s_b − logsumexp over the nodes n of G of s_n,        s'_n = s_n for the largest complete nodes:

the exponentials of a group's adjusted scores add up to exp(s'_G). So everything that takes landmarks' scores can take
adjusted ones, as `landmark.attention.Given` gates: tiles, the best k blocks, the context miss token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention.layout import blocks_and_landmarks
from landmark.utils.window_batch import most_blocks


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """Groups of landmarks.

    fan_out: m, nodes of a group. bias: (levels, H_kv) or (levels, H), added to the scores of each level's groups.
    """

    fan_out: int
    bias: Tensor

    def for_heads(self, heads: int) -> Hierarchy:
        """The same with a bias for each of H query heads."""
        return Hierarchy(self.fan_out, self.bias.repeat_interleave(heads // self.bias.shape[1], 1))


def first_bias(fan_out: int, levels: int, kv_heads: int) -> Tensor:
    """The bias with which a group of nodes of equal scores weighs as much as they do together: (levels, H_kv)."""
    return torch.full((levels, kv_heads), math.log(fan_out))


def landmark_scores(
    q: Tensor, k: Tensor, block_size: int, phase: Tensor, prefix: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores of the landmarks, −∞ where a query does not see them, and the number of each query's own block.

    Args:
        q: (B, H, T, d).
        k: (B, H, prefix + T, d).
        block_size: ℓ.
        phase: (B,), tokens missing from the first block.
        prefix: keys before the first query.
        scale: factor of the scores.

    Returns (B, H, T, blocks), in nats, and (B, T). A first block without tokens is not seen.
    """
    phase, length = phase.to(q.device), k.shape[2]
    block = torch.arange(most_blocks(length, block_size), device=q.device)
    row = block * (block_size + 1) + block_size - phase[:, None]  # of each block's landmark
    keys = k.gather(2, row.clamp(0, length - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
    own = blocks_and_landmarks(phase, length, block_size)[0][:, prefix:]
    seen = (block < own[..., None]) & (row > 0)[:, None]
    scores = torch.einsum("bhtd,bhnd->bhtn", q, keys) * scale
    return scores.masked_fill(~seen[:, None], -torch.inf), own


def adjust(
    scores: Tensor, own: Tensor, hierarchy: Hierarchy, earlier: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Adjusted scores, s' above.

    Args:
        scores: (B, H, T, n), of consecutive blocks, −∞ for those that a query does not see.
        own: (B or 1, T), the number of each query's own block among them.
        hierarchy: with a bias for each of H heads.
        earlier: for each level (B, H, T, r), scores of the r < m nodes before these blocks that are in no complete
            group of the next level yet; every query sees them. None where no block comes before.

    Returns the scores of the blocks, and of the earlier nodes, adjusted.
    """
    fan_out, bias = hierarchy.fan_out, hierarchy.bias
    if len(bias) == 0:
        return scores, []
    before, *above = earlier or [scores[..., :0]] * len(bias)
    own = own + before.shape[-1]
    nodes = torch.cat([before, scores], -1)
    spare = -nodes.shape[-1] % fan_out
    groups = F.pad(nodes, (0, spare), value=-torch.inf).unflatten(-1, (-1, fan_out))
    seen = groups > -torch.inf
    complete = torch.arange(groups.shape[-2], device=own.device) < (own // fan_out)[:, None, :, None]
    complete = complete & seen.any(-1)
    mean = groups.masked_fill(~seen, 0.0).sum(-1) / seen.sum(-1).clamp(min=1)
    of_groups = torch.where(complete, mean + bias[0][:, None, None], -torch.inf)
    rest = Hierarchy(fan_out, bias[1:])
    adjusted, adjusted_above = adjust(of_groups, own // fan_out, rest, above)
    inside = groups - _logsumexp(groups)
    adjusted = torch.where(complete[..., None], adjusted[..., None] + inside, groups).flatten(-2)
    adjusted = adjusted[..., : nodes.shape[-1]]
    return adjusted[..., before.shape[-1] :], [adjusted[..., : before.shape[-1]], *adjusted_above]


def _logsumexp(x: Tensor) -> Tensor:
    """Log-sum-exp over the last dimension, kept; finite, and without gradient, where all are −∞."""
    limits = torch.finfo(x.dtype)
    largest = x.detach().amax(-1, keepdim=True).clamp(min=limits.min)
    return largest + (x - largest).exp().sum(-1, keepdim=True).clamp(min=limits.tiny).log()
