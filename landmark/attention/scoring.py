"""How scores are made of queries and keys: a factor, and a cap as in Gemma 2, which holds for landmarks too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """Scores s = q·k·scale, or with a cap softcap·tanh(s / softcap), in nats.

    scale: None: 1/√d. softcap: None: there is no cap. Raises ValueError for a cap that is not above 0.
    """

    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self):
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap={self.softcap}: must be above 0")

    def scale_of(self, head_dim: int) -> float:
        """The factor of the scores of heads with d numbers."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """The scores with a cap, in the same unit; None: as they are."""
    return scores if cap is None else (scores / cap).tanh() * cap


def capped_in_place(scores: Tensor, cap: float | None) -> Tensor:
    """`capped`, overwriting the scores."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def slope(scores: Tensor, cap: float, out: Tensor) -> Tensor:
    """The derivative of capped scores with respect to those without a cap, 1 − (capped / cap)², written to `out`."""
    return out.copy_(scores).div_(cap).square_().neg_().add_(1)
