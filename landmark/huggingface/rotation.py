"""From the order and rotation of a model's channels to those of a memory, which assigns positions itself."""

from __future__ import annotations

import torch
from torch import Tensor


def unrotate(x: Tensor, position_ids: Tensor | None, inverse_frequencies: Tensor) -> Tensor:
    """Undo a model's rotation of queries or keys.

    x: (B, H, T, d), of whose first r channels i and i + r/2 form a pair; position_ids: (B or 1, T), None: all are 0,
    and nothing is turned; inverse_frequencies: (r/2,), radians a position. Returns (B, H, T, d) with the elements of a
    pair side by side, as in `landmark.memory`; channels that do not rotate stay where they are.
    """
    turning = 2 * len(inverse_frequencies)
    rotated, unrotated = x.split([turning, x.shape[-1] - turning], -1)
    pairs = torch.stack(rotated.chunk(2, -1), -1)
    if position_ids is not None:
        angle = position_ids[:, None, :, None].float() * inverse_frequencies.to(x.device).float()  # as the model does
        angle = angle.to(torch.promote_types(x.dtype, torch.float32))
        turn = torch.polar(torch.ones_like(angle), -angle)
        pairs = torch.view_as_real(torch.view_as_complex(pairs.to(angle.dtype)) * turn)
    turned_back = pairs.flatten(-2).to(x.dtype)
    return torch.cat([turned_back, unrotated], -1) if unrotated.shape[-1] else turned_back
