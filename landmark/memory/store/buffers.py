"""Tensors that a memory writes to, chunk after chunk."""

from __future__ import annotations

import torch
from torch import Tensor


def new_buffer(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", pinned: bool = False) -> Tensor:
    """A tensor whose numbers are not set; pinned: in memory of the CPU that a GPU can copy from directly.

    A tensor that is made as usual under `torch.inference_mode` could not be written to outside of it.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
