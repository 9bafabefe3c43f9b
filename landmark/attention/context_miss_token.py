"""The context miss token (CMT): its weight S is the weight of past landmarks, known before they are scored.

Landmarks are *free* or *controlled*. The outer softmax runs over the tokens of the query's own block, the free
landmarks and the token; the controlled landmarks have a softmax of their own, times the token's weight S. Where no
controlled landmark is visible, S is lost (paper, Appendix D).

This is one ordinary softmax again: give each controlled landmark c the gate cmt_score + s_c − logsumexp(controlled).
Together they have the token's weight. Gates here are the landmarks' scores (N, block, query), −∞ where a query sees
none, in units of log 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_miss_scores(q: Tensor, cmt: Tensor, kv_heads: int) -> Tensor:
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


def share_cmt_weight(gates: Tensor, cmt_score: Tensor, controlled: Tensor) -> Tensor:
    """Make the controlled gates share the weight of the token, in place.

    cmt_score: (N, 1, query); controlled: as gates, bool. Returns the token's own gate (N, 1, query): its score where no
    controlled landmark is visible, else −∞.
    """
    controlled_gates = gates.masked_fill(~controlled, -torch.inf)
    largest = controlled_gates.amax(1, keepdim=True)
    unseen = largest == -torch.inf
    largest.masked_fill_(unseen, 0.0)
    total = controlled_gates.sub_(largest).exp2_().sum(1, keepdim=True).log2_().add_(largest)
    gates.add_(torch.where(unseen, 0.0, cmt_score - total) * controlled)
    return torch.where(unseen, cmt_score, -torch.inf)


def shared_weight_gradient(
    weighted_means: Tensor, row_mean: Tensor, cmt_weight: Tensor, controlled: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean that the landmarks' gradient subtracts, and the gradient of the token's score.

    A free landmark's gradient is P_ib (D_ib − D_i), a controlled one's P_ib (D_ib − D_ic), with D_ic = Σ P_ib·D_ib / S
    over the controlled landmarks; the token's is S (D_ic − D_i).

    Args:
        weighted_means: (N, block, query), P_ib·D_ib.
        row_mean: (N, 1, query), D_i.
        cmt_weight: (N, 1, query), S.
        controlled: (N, block, query), bool.

    Returns (N, block, query) and (N, 1, query).
    """
    of_controlled = (weighted_means * controlled).sum(1, keepdim=True)
    mean = of_controlled / cmt_weight.clamp(min=torch.finfo(cmt_weight.dtype).tiny)
    return torch.where(controlled, mean, row_mean), torch.addcmul(of_controlled, cmt_weight, row_mean, value=-1)
