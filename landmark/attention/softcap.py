"""Scores that cannot grow beyond a cap: cap · tanh(score / cap), as in Gemma 2. Landmarks' scores are capped too."""

from __future__ import annotations

from torch import Tensor


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """The scores with a cap, in the same unit; None: as they are."""
    return scores if cap is None else (scores / cap).tanh() * cap


def capped_in_place(scores: Tensor, cap: float | None) -> Tensor:
    """`capped`, overwriting the scores."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def slope(scores: Tensor, cap: float, out: Tensor) -> Tensor:
    """The derivative of capped scores with respect to those without a cap, 1 − (capped / cap)², written to `out`."""
    return out.copy_(scores).div_(cap).square_().neg_().add_(1)
