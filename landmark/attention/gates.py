"""Gates: how much an earlier block weighs in the outer softmax of a query, beside the tokens of its own block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
