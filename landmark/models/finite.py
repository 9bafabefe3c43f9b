"""Weights that are numbers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from landmark.utils.errors import UserError


def check_finite(model: nn.Module, folder: Path) -> None:
    """Raise UserError, naming folder and weight, where a model just loaded has a weight that is not finite."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and weight.numel() and not all(each.isfinite() for each in weight.aminmax()):
            raise UserError(
                f"{folder}: the weight {name} has values that are not finite: nothing can be computed with it, train "
                "again with a lower train.max_lr, or name another run"
            )
