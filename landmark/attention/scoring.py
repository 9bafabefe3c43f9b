"""How queries score keys, how much a block weighs, and which blocks of a window are the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
    its block. The best blocks (`top_k`, retrieval) are those with the best landmarks, whatever α is. Raises ValueError
    for another number.
    """

    alpha: float = 0.0

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: must be from 0, the paper's gate, to 1, one softmax over all tokens")

    @property
    def of_landmark(self) -> float:
        """1 − α, the part of a block's log-sum-exp that its landmark has to know."""
        return 1 - self.alpha

    def of_blocks(self, scores: Tensor, logsumexp: Callable[[], Tensor]) -> Tensor:
        """The gates of blocks. scores: of their landmarks. logsumexp: of their tokens' scores, of the same shape."""
        return scores + self.alpha * logsumexp() if self.alpha else scores


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """The scores with a cap, in the same unit; None: as they are."""
    return scores if cap is None else (scores / cap).tanh() * cap


def capped_in_place(scores: Tensor, cap: float | None) -> Tensor:
    """`capped`, overwriting the scores."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def slope(scores: Tensor, cap: float, out: Tensor) -> Tensor:
    """The derivative of capped scores with respect to those without a cap, 1 − (capped / cap)², written to `out`."""
    return out.copy_(scores).div_(cap).square_().neg_().add_(1)


def keep_best(gates: Tensor, top_k: int, dim: int) -> Tensor:
    """Put −∞ in the scores of landmarks, in place, but for the highest of each query, and those that tie with them.

    So a query attends to its own block and to the best earlier ones, as it reads a memory. The others have no weight
    and no gradient. dim: of the blocks.
    """
    if gates.shape[dim] > top_k:
        least = gates.topk(top_k, dim).values.narrow(dim, top_k - 1, 1)
        gates.masked_fill_(gates < least, -torch.inf)
    return gates
