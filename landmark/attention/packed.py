"""Documents of different lengths, packed one after the other into one row; they do not see each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from landmark.attention.inputs import AttentionInputs
from landmark.attention.layout import can_read


def check_packed(cu_seqlens: Tensor, batch: int, length: int, prefix: int) -> int:
    """The number of packed documents; they begin at cu_seqlens[:-1] and end at cu_seqlens[1:].

    Args:
        cu_seqlens: (documents + 1,), integer.
        batch: rows, which must be 1.
        length: T, the tokens of the row.
        prefix: keys before the first query, which must be 0.

    Raises ValueError for more than one row, for a prefix, and, where `can_read` allows reading them, for bounds that
    do not rise from 0 to `length`.
    """
    if batch != 1 or prefix:
        raise ValueError(f"cu_seqlens packs documents into one row without a prefix, got {batch} rows, prefix={prefix}")
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


def documents(inputs: AttentionInputs) -> Iterator[tuple[slice, AttentionInputs]]:
    """The rows and the inputs of each document that has tokens; all of them, where nothing is packed."""
    if inputs.cu_seqlens is None:
        yield slice(None), inputs
        return
    for i, (start, end) in enumerate(itertools.pairwise(inputs.cu_seqlens.tolist())):
        if start == end:
            continue
        rows, document = slice(start, end), slice(i, i + 1)
        yield (
            rows,
            inputs._replace(
                q=inputs.q[:, :, rows],
                k=inputs.k[:, :, rows],
                v=inputs.v[:, :, rows],
                phase=inputs.phase[document],
                cmt_scores=None if inputs.cmt_scores is None else inputs.cmt_scores[:, :, rows],
                controlled=None if inputs.controlled is None else inputs.controlled[document],
                cu_seqlens=None,
            ),
        )


def one_by_one(
    attend: Callable[[AttentionInputs], tuple[Tensor, Tensor]], inputs: AttentionInputs
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and log-sum-exp (B, H, T) of a backend that is called for each document separately."""
    if inputs.cu_seqlens is None:
        return attend(inputs)
    outs, lses = zip(*(attend(document) for _, document in documents(inputs)), strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
