"""Where blocks begin: the arithmetic of landmarks in a stream and in a window cut from it; and checked inputs.

After every ℓ = `block_size` normal tokens of a stream there is one landmark, so a block with its landmark is W = ℓ+1
positions wide. A window may be cut anywhere. Its *phase* is the stream position of its first token modulo W, which is
the number of tokens missing from its first block.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from landmark.utils.window_batch import most_blocks

ROWS, SAMPLES = ("q", "k", "v", "extra"), ("phase", "controlled")  # inputs with a row for each token, or sample


@dataclass(frozen=True)
class Window:
    """Windows of a batch, each with a phase of its own.

    block_size: ℓ, normal tokens of a block. phase: (B,), integer, 0…ℓ, best where `landmark.attention.place_phase` puts
    it; None: 0. prefix: keys before the first query.
    """

    block_size: int
    phase: Tensor | None = None
    prefix: int = 0


@dataclass(frozen=True)
class Packed:
    """Documents of different lengths, packed one after the other into a batch of one; they do not see each other.

    block_size: ℓ. phase: (documents,), integer, 0…ℓ, of each document; None: 0. cu_seqlens: (documents + 1,), integer,
    from 0 to T, the rows where documents begin and end.
    """

    block_size: int
    phase: Tensor | None
    cu_seqlens: Tensor


Layout = Window | Packed


def check_phase(phase: Tensor | None, batch: int, block_size: int, device: torch.device | str = "cpu") -> Tensor:
    """The phase as an integer tensor (B,) on its device; None: zeros, made on `device`, because a copy would wait.

    Raises ValueError for a wrong shape, and for a value outside 0…block_size where `can_read` allows reading it.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if phase is None:
        return torch.zeros(batch, dtype=torch.int32, device=device)
    if phase.shape != (batch,):
        raise ValueError(f"phase must have shape ({batch},), one number for each sample, got {tuple(phase.shape)}")
    if can_read(phase) and not bool(((phase >= 0) & (phase <= block_size)).all()):
        raise ValueError(f"phase must lie in 0…block_size={block_size}, got {phase.tolist()}")
    return phase if phase.dtype == torch.int32 else phase.to(torch.int64)


def can_read(x: Tensor) -> bool:
    """Whether Python may read the values: only on the CPU, where reading stalls no device, and not while compiling."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_controlled(
    controlled: Tensor | None, batch: int, length: int, block_size: int, device: torch.device
) -> Tensor:
    """Whether the context miss token controls each block's landmark, (B, blocks or more), bool, on the device.

    length: tokens of a window, landmarks included. Raises ValueError where a sample or a block is missing.
    """
    blocks = most_blocks(length, block_size)
    if controlled is None:
        return torch.zeros(batch, blocks, dtype=torch.bool, device=device)
    if controlled.ndim != 2 or len(controlled) != batch or controlled.shape[1] < blocks:
        raise ValueError(f"controlled must have shape ({batch}, {blocks} or more), got {tuple(controlled.shape)}")
    return controlled.to(device, torch.bool, non_blocking=True)


def blocks_and_landmarks(phase: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """For each position of a window the number of its block, from 0, and whether it holds a landmark: (B, length)."""
    position = phase[:, None] + torch.arange(length, device=phase.device)
    return position // (block_size + 1), position % (block_size + 1) == block_size


def text_positions(stream: Tensor, width: int) -> Tensor:
    """Positions of a stream, counted without landmarks; a landmark has that of the token behind it. width: W."""
    return stream - stream // width


def insert_landmarks(tokens: Tensor, position: int, block_size: int, landmark: int) -> tuple[Tensor, Tensor]:
    """Raw ids (B, n) with landmarks, (B, T), and the indices (n,) of the raw tokens among them.

    position: stream positions before the tokens, landmarks included. With ℓ = 2, from position 0 on::

        raw tokens        a b   c d   e
        with landmarks    a b L c d L e          raw tokens at 0 1 3 4 6

    A landmark follows its block at once: where the tokens end with a complete block, the result ends on a landmark. So
    `position` is never the position of a landmark.
    """
    fed = position - position // (block_size + 1)
    count = tokens.shape[1]
    raw = fed + torch.arange(count, device=tokens.device)
    at = raw + raw // block_size - position
    total = fed + count + (fed + count) // block_size - position
    with_landmarks = tokens.new_full((tokens.shape[0], total), landmark)
    with_landmarks[:, at] = tokens
    return with_landmarks, at


def check_packed(cu_seqlens: Tensor, batch: int, length: int) -> int:
    """The number of packed documents.

    Raises ValueError for more than one row (`batch`), and, where `can_read` allows reading them, for bounds that do not
    rise from 0 to `length`.
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


class AttentionInputs(NamedTuple):
    """The arguments of `landmark.attention.landmark_attention`, checked and with their defaults filled in.

    q: (B, H, T, d). k, v: (B, H_kv, prefix + T, d); H_kv = H but with "triton". extra: (B, H, T), scores of a context
    miss token, in nats; None: there is none. phase: (samples,), int32 or int64. controlled: (samples, blocks), bool,
    landmarks that share the weight of that token; None exactly where `extra` is None.
    cu_seqlens: (samples + 1,), of packed samples; None: each element of the batch is one. softcap: not for "triton".
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
