"""The checked inputs of landmark attention, as every backend gets them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    """The arguments of `landmark.attention.landmark_attention`, checked and with their defaults filled in.

    q: (B, H, T, d), rotated.
    k, v: (B, H_kv, prefix + T, d). The backend "triton" takes H_kv that divides H; the others get H_kv = H.
    extra: (B, H, T), scores of a place without a value in the outer softmax, in nats; None: there is none.
    phase: (samples,), int32 or int64, tokens missing from the first block.
    controlled: (samples, blocks), bool, landmarks that share the weight of the place without a value; None exactly
        where `extra` is None.
    cu_seqlens: (samples + 1,), the rows where packed samples begin and end; None: each element of the batch is one
        sample.
    block_size: ℓ, normal tokens of a block.
    prefix: keys before the first query.
    scale: factor of the scores.
    softcap: cap of the scores, in nats; None: there is none. Not for "triton".
    top_k: gated blocks that a query attends to, those with the best landmarks; None: all. Not for "triton".
    alpha: how much of the log-sum-exp of its tokens' scores is added to the gate of a block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    extra: Tensor | None
    phase: Tensor
    controlled: Tensor | None
    cu_seqlens: Tensor | None
    block_size: int
    prefix: int
    scale: float
    softcap: float | None = None
    top_k: int | None = None
    alpha: float = 0.0

    def to(self, dtype: torch.dtype) -> AttentionInputs:
        """The same with all that is computed with in one type."""
        names = ("q", "k", "v", "extra")
        return self._replace(**{name: x if (x := getattr(self, name)) is None else x.to(dtype) for name in names})

    def documents(self) -> Iterator[tuple[slice, AttentionInputs]]:
        """The rows and the inputs of each packed document that has tokens; all of them, where nothing is packed."""
        if self.cu_seqlens is None:
            yield slice(None), self
            return
        for i, (start, end) in enumerate(itertools.pairwise(self.cu_seqlens.tolist())):
            if start == end:
                continue
            rows, document = slice(start, end), slice(i, i + 1)
            yield (
                rows,
                self._replace(
                    q=self.q[:, :, rows],
                    k=self.k[:, :, rows],
                    v=self.v[:, :, rows],
                    extra=None if self.extra is None else self.extra[:, :, rows],
                    phase=self.phase[document],
                    controlled=None if self.controlled is None else self.controlled[document],
                    cu_seqlens=None,
                ),
            )

    def one_by_one(self, attend: Callable[[AttentionInputs], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Output (B, H, T, d) and log-sum-exp (B, H, T) of a backend that is called for each document separately."""
        if self.cu_seqlens is None:
            return attend(self)
        outs, lses = zip(*(attend(document) for _, document in self.documents()), strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that an enclosing `torch.autocast` computes attention in; without one, as they are.

    Rotary positions and norms return float32 under autocast, projections half precision. As for PyTorch's own
    attention, all become one type; float64 is left alone.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """A context in which the operations on the tensor's device compute in the types of their arguments."""
    return torch.autocast(like.device.type, enabled=False)
