"""How queries score keys, how much a block weighs, which blocks of a window are the best, and one more place.

The place is in the outer softmax and has no value: learned attention sinks, which are merged into what attention
without them returns, or a context miss token (CMT, paper, Appendix D), whose weight the *controlled* landmarks share.
Gates here are (N, block, query), in units of log 2, and −∞ for a landmark that the query does not see.
README.md beside this file has the equations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.layout import without_autocast


@dataclass(frozen=True)
class Scoring:
    """Scores s = q·k·scale, or with a cap, as in Gemma 2, softcap·tanh(s / softcap), in nats; of landmarks too.

    scale: None: 1/√d. softcap: None: there is no cap. Raises ValueError for a cap that is not above 0.
    """

    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self):
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap={self.softcap}: must be above 0")

    def scale_of(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


@dataclass(frozen=True)
class Grouped:
    """The gate of a block is the score of its landmark (Section 3.1), plus a share of what its tokens say themselves.

    With L_ib the log-sum-exp of query i's scores of the tokens of block b, token j of the block has the weight
    w_ij ∝ exp(s_i,lm(b) − (1 − α) L_ib + s_ij).

    alpha: α from 0, the paper's gate, to 1, where all tokens share one softmax and the score of a landmark is a bias of
    its block. The best blocks are those with the best landmarks, whatever α is. Raises ValueError for another number.
    """

    alpha: float = 0.0

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: must be from 0, the paper's gate, to 1, one softmax over all tokens")

    @property
    def landmark_share(self) -> float:
        """1 − α, the part of a block's log-sum-exp that its landmark has to know."""
        return 1 - self.alpha

    def block_gates(self, scores: Tensor, logsumexp: Callable[[], Tensor]) -> Tensor:
        """The gates of blocks. scores: of their landmarks. logsumexp: of their tokens' scores, of the same shape."""
        return scores + self.alpha * logsumexp() if self.alpha else scores


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """The scores with a cap, in the same unit; None: as they are."""
    return scores if cap is None else (scores / cap).tanh() * cap


def capped_in_place(scores: Tensor, cap: float | None) -> Tensor:
    """`capped`, overwriting the scores."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True)
class ContextMiss:
    """A context miss token, which has no value and no position in the window.

    key: (H_kv, d), rotated; the attention of a memory rotates it itself. controlled: (B, blocks or more), bool, or for
    packed documents (documents, …): whether the token controls the landmark of each block; None: of none.
    """

    key: Tensor
    controlled: Tensor | None = None

    def scores_of(self, q: Tensor, scoring: Scoring) -> Tensor:
        """The token's score of each query (B, H, T, d), rotated: (B, H, T). ValueError: the key does not fit."""
        heads, dim = q.shape[1], q.shape[3]
        if self.key.ndim != 2 or heads % len(self.key) or self.key.shape[1] != dim:
            raise ValueError(f"a context miss token needs a key (heads of keys, {dim}), got {tuple(self.key.shape)}")
        compute = torch.promote_types(q.dtype, torch.float32)
        key = self.key.repeat_interleave(heads // len(self.key), 0)
        with without_autocast(q):
            scores = torch.einsum("bhtd,hd->bht", q.to(compute), key.to(compute)) * scoring.scale_of(dim)
        return capped(scores, scoring.softcap)


@dataclass(frozen=True)
class Sinks:
    """A place whose score is the same for all queries of a head, as in GPT-OSS. scores: (H,), in nats."""

    scores: Tensor

    def merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """A softmax's output (B, H, T, d) and log-sum-exp (B, H, T) with the place added to it."""
        sinks = self.scores.to(lse.dtype)[:, None]
        out = (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
        return out, torch.logaddexp(lse, sinks.expand_as(lse))


def share_cmt_weight(gates: Tensor, cmt_score: Tensor, controlled: Tensor) -> Tensor:
    """Change the gates (N, block, query) of controlled landmarks, in place, so that they share the token's weight.

    Returns the token's own gate (N, 1, query): its score where the query sees no controlled landmark, else −∞.
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
    """The mean that is subtracted in the gradient of each landmark's score, and the gradient of the token's score.

    README.md beside this file has the formulas. weighted_means: (N, block, query), P_ib·D_ib. row_mean, cmt_weight: (N,
    1, query), D_i and S. controlled: (N, block, query), bool. Returns (N, block, query) and (N, 1, query).
    """
    controlled_sum = (weighted_means * controlled).sum(1, keepdim=True)
    mean = controlled_sum / cmt_weight.clamp(min=torch.finfo(cmt_weight.dtype).tiny)
    return torch.where(controlled, mean, row_mean), torch.addcmul(controlled_sum, cmt_weight, row_mean, value=-1)
