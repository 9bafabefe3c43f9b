"""Documents packed one after the other into one row, none of which sees another (variable lengths, without padding)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from landmark.attention.layout import can_look


def check_packed(cu_seqlens: Tensor, batch: int, length: int, prefix: int) -> int:
    """Number of documents that begin at cu_seqlens[:-1] and end at cu_seqlens[1:].

    Raises ValueError where there is more than one row, a prefix, or (only looked at where `can_look`) where they do not
    follow one another from 0 to `length`.
    """
    if batch != 1 or prefix:
        raise ValueError(f"cu_seqlens packs documents into one row without a prefix, got {batch} rows, prefix={prefix}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        shape, dtype = tuple(cu_seqlens.shape), cu_seqlens.dtype
        raise ValueError(f"cu_seqlens must be (documents + 1,) integers, got {shape} of {dtype}")
    if can_look(cu_seqlens):
        ends = [0, *cu_seqlens.tolist(), length]
        if ends != sorted(ends) or cu_seqlens[0] != 0 or cu_seqlens[-1] != length:
            raise ValueError(f"cu_seqlens must rise from 0 to T = {length}, got {cu_seqlens.tolist()}")
    return len(cu_seqlens) - 1


def longest(cu_seqlens: Tensor) -> int:
    """Length of the longest document; where nobody can look, the least that it can be: 1."""
    return int(cu_seqlens.diff().max()) if can_look(cu_seqlens) else 1


def one_by_one(
    attend: Callable[..., tuple[Tensor, Tensor]],
    cu_seqlens: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    phase: Tensor,
    prefix: int,
    scale: float,
    miss: Tensor | None,
    controlled: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What a backend that knows no packed documents computes of each: output (1, H, T, d), log-sum-exp (1, H, T)."""
    ends = cu_seqlens.tolist()
    outs, lses = [], []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        parts = (x[:, :, start:end] for x in (q, k, v))
        its_miss = None if miss is None else miss[:, :, start:end]
        its_controlled = None if controlled is None else controlled[i : i + 1]
        out, lse = attend(*parts, block_size, phase[i : i + 1], prefix, scale, its_miss, its_controlled)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
