"""The context miss token (CMT): what the landmarks of the past weigh is decided before they are looked at.

Landmarks are *free* or *controlled*. The outer softmax runs over the tokens of the query's own block, the free
landmarks and the token; the controlled landmarks have a softmax of their own, times the token's weight S. Where no
controlled landmark is visible, S goes nowhere (paper, Appendix D).

That is one ordinary softmax again: let each controlled landmark c stand in it with miss + s_c − logsumexp(controlled),
and together they weigh what the token does. Gates here are the landmarks' scores (N, block, query), −∞ where a query
sees none, in units of log 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def miss_scores(q: Tensor, cmt: Tensor, kv_heads: int) -> Tensor:
    """Scores of the token, unscaled, in at least single precision: (B, H, T).

    q: (B, H, T, d); cmt: (H_kv, d), its key, both rotated. Raises ValueError for a key of another shape.
    """
    heads, dim = q.shape[1], q.shape[3]
    if cmt.shape != (kv_heads, dim):
        raise ValueError(f"cmt must have shape ({kv_heads}, {dim}), a key for each head, got {tuple(cmt.shape)}")
    compute = torch.promote_types(q.dtype, torch.float32)
    cmt = cmt.repeat_interleave(heads // kv_heads, 0)
    with torch.autocast(q.device.type, enabled=False):
        return torch.einsum("bhtd,hd->bht", q.to(compute), cmt.to(compute))


def defer(gates: Tensor, miss: Tensor, controlled: Tensor) -> Tensor:
    """Make the controlled gates share the score of the token, in place.

    miss: (N, 1, query); controlled: as gates, bool. Returns (N, 1, query), the score of what goes nowhere: the token's,
    where no controlled landmark is visible, else −∞.
    """
    held = gates.masked_fill(~controlled, -torch.inf)
    largest = held.amax(1, keepdim=True)
    unseen = largest == -torch.inf
    largest.masked_fill_(unseen, 0.0)
    total = held.sub_(largest).exp2_().sum(1, keepdim=True).log2_().add_(largest)
    gates.add_(torch.where(unseen, 0.0, miss - total) * controlled)
    return torch.where(unseen, miss, -torch.inf)


def deferred_gradient(
    weighted_means: Tensor, row_mean: Tensor, weight: Tensor, controlled: Tensor
) -> tuple[Tensor, Tensor]:
    """What the landmarks' gradient subtracts, and the gradient of the token's score, (N, block or 1, query).

    weighted_means: (N, block, query), P_ib·D_ib. row_mean, weight: (N, 1, query), D_i and S. A free landmark's gradient
    is P_ib (D_ib − D_i), a controlled one's P_ib (D_ib − D_ic), with D_ic = Σ P_ib·D_ib / S over the controlled; the
    token's is S (D_ic − D_i).
    """
    of_controlled = (weighted_means * controlled).sum(1, keepdim=True)
    mean = of_controlled / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    return torch.where(controlled, mean, row_mean), torch.addcmul(of_controlled, weight, row_mean, value=-1)
