"""Checks of documents of different lengths that are packed one after the other into one row."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.layout import can_read


def check_packed(cu_seqlens: Tensor, batch: int, length: int) -> int:
    """The number of packed documents; they begin at cu_seqlens[:-1] and end at cu_seqlens[1:].

    Args:
        cu_seqlens: (documents + 1,), integer.
        batch: rows, which must be 1.
        length: T, the tokens of the row.

    Raises ValueError for more than one row, and, where `can_read` allows reading them, for bounds that do not rise from
    0 to `length`.
    """
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, got {batch} rows")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        shape, dtype = tuple(cu_seqlens.shape), cu_seqlens.dtype
        raise ValueError(f"cu_seqlens must be (documents + 1,) integers, got {shape} of {dtype}")
    if can_read(cu_seqlens):
        ends = [0, *cu_seqlens.tolist(), length]
        if ends != sorted(ends) or cu_seqlens[0] != 0 or cu_seqlens[-1] != length:
            raise ValueError(f"cu_seqlens must rise from 0 to T = {length}, got {cu_seqlens.tolist()}")
    return len(cu_seqlens) - 1


def longest(cu_seqlens: Tensor) -> int:
    """Tokens of the longest document; the least possible number, 1, where `can_read` forbids reading it."""
    return int(cu_seqlens.diff().max()) if can_read(cu_seqlens) else 1
