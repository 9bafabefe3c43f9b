"""The checked inputs of landmark attention, as every backend gets them."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

ROWS, SAMPLES = ("q", "k", "v", "extra"), ("phase", "controlled")  # inputs with a row for each token, or sample


class AttentionInputs(NamedTuple):
    """The arguments of `landmark.attention.landmark_attention`, checked and with their defaults filled in.

    q: (B, H, T, d). k, v: (B, H_kv, prefix + T, d); but for "triton" with H_kv = H. extra: (B, H, T), scores of a
    context miss token, in nats; None: there is none. phase: (samples,), int32 or int64. controlled:
    (samples, blocks), bool, landmarks that share the weight of that place; None exactly where `extra` is None.
    cu_seqlens: (samples + 1,), of packed samples; None: each element of the batch is one. softcap, top_k: not for
    "triton".
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

    def one_by_one(self, attend: "Callable[[AttentionInputs], tuple[Tensor, Tensor]]") -> tuple[Tensor, Tensor]:
        """Output (B, H, T, d) and log-sum-exp (B, H, T) of a backend that is called for each document separately."""
        if self.cu_seqlens is None:
            return attend(self)
        found = []
        for i, (start, end) in enumerate(itertools.pairwise(self.cu_seqlens.tolist())):
            if start < end:
                rows = {name: None if (x := getattr(self, name)) is None else x[:, :, start:end] for name in ROWS}
                own = {name: None if (x := getattr(self, name)) is None else x[i : i + 1] for name in SAMPLES}
                found.append(attend(self._replace(**rows, **own, cu_seqlens=None)))
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that an enclosing `torch.autocast` computes attention in; float64 is left alone.

    Rotary positions and norms return float32 under autocast, projections half precision: all become one type.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """A context in which the operations on the tensor's device compute in the types of their arguments."""
    return torch.autocast(like.device.type, enabled=False)
