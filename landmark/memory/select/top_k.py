"""The blocks with the highest scores; among equal scores the newer ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from landmark.attention.fused.top_k_landmarks import YOUNGEST

GROUP = 32  # most scores of a group in `_highest`
FEW = 1 << 14  # scores of which a CPU finds the highest sooner in one pass


def best_ages(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of the blocks with the `count` highest scores, in any order; among equal scores the newer block."""
    if count == len(ages):
        return ages.expand(*scores.shape[:-1], count)
    if scores.device.type != "cpu" and scores.dtype == torch.float32:  # reading `tied` would stall the device
        return _top_packed(scores, ages, count)
    values, indices = _highest(scores, count + 1)
    best = ages[indices[..., :count]]
    tied = values[..., -1] == values[..., -2]  # a tie matters only between the last score taken and the first one left
    if bool(tied.any()):
        best[tied] = _newer(scores[tied], values[tied][..., -1:], ages, count)
    return best


def _top_packed(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """`best_ages` of float32 scores in one pass, which reads nothing on the CPU: integers have the order of the pairs.

    The high half of each integer is the score, the low half the recency. The bits of a float, read as an integer, have
    its order; those of negative ones are turned round.
    """
    bits = (scores + 0.0).view(torch.int32)  # −0 becomes 0
    bits = (bits ^ ((bits >> 31) & YOUNGEST)).to(torch.int64)
    return YOUNGEST - (_highest((bits << 32) | (YOUNGEST - ages), count)[0] & YOUNGEST)


def _newer(scores: Tensor, edge: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages of `count` blocks: all with a score above `edge`, and the newest of those with exactly this score."""
    rank = torch.where(scores > edge, 0, torch.where(scores == edge, ages, ages.shape[0] + 1))
    return ages[rank.topk(count, dim=-1, largest=False).indices]


def _highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` in two passes: the highest scores are in the groups of scores with the highest maxima."""
    if scores.device.type == "cpu" and scores.numel() <= FEW:
        return scores.topk(count, dim=-1)
    group = GROUP
    if scores.device.type == "cpu":  # so that both passes are short
        group = max(1, min(GROUP, math.isqrt(scores.shape[-1] // (2 * count))))
    columns = scores.shape[-1] // group
    if columns <= count:
        return scores.topk(count, dim=-1)
    grouped = scores[..., : columns * group].unflatten(-1, (group, columns))
    chosen = grouped.amax(-2).topk(count, dim=-1, sorted=False).indices
    inside = (chosen[..., None] + torch.arange(0, columns * group, columns, device=scores.device)).flatten(-2)
    rest = torch.arange(columns * group, scores.shape[-1], device=scores.device).expand(*inside.shape[:-1], -1)
    candidates = torch.cat([inside, rest], -1)
    best = scores.gather(-1, candidates).topk(count, dim=-1)
    return best.values, candidates.gather(-1, best.indices)
