"""Where blocks begin: the arithmetic of landmarks in a stream and in a window cut from it.

After every ℓ = ``block_size`` normal tokens of a stream there is one landmark, so a block with its landmark is
W = ℓ+1 positions wide. A window may be cut anywhere; its *phase* is the stream position of its first token
modulo W, the number of tokens missing from its first block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_phase(phase: Tensor | None, batch: int, block_size: int) -> Tensor:
    """Return the phase as a (B,) int64 tensor on the same device, or zeros on the CPU for None.

    Raises ValueError for a wrong shape or a value outside 0…block_size; values are only checked where `can_look`.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if phase is None:
        return torch.zeros(batch, dtype=torch.int64)
    if phase.shape != (batch,):
        raise ValueError(f"phase must have shape ({batch},), one number a sample, got {tuple(phase.shape)}")
    if can_look(phase) and not bool(((phase >= 0) & (phase <= block_size)).all()):
        raise ValueError(f"phase must lie in 0…block_size={block_size}, got {phase.tolist()}")
    return phase.to(torch.int64)


def can_look(x: Tensor) -> bool:
    """Whether Python may read the values: on the CPU, where this stalls no device, and not while compiling."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def most_blocks(length: int, block_size: int) -> int:
    """The most blocks that a window of `length` tokens can have a part of, over all phases."""
    return (block_size + length - 1) // (block_size + 1) + 1


def check_controlled(controlled: Tensor | None, batch: int, length: int, block_size: int) -> Tensor:
    """Return (B, blocks), bool, whether the context miss token controls each block's landmark.

    Args:
        controlled: (B, blocks), at least as many as there can be; None: no landmark is controlled.
        batch: B.
        length: of the windows, landmarks included.
        block_size: ℓ, normal tokens of a block.

    Raises ValueError where a sample or a block is missing.
    """
    blocks = most_blocks(length, block_size)
    if controlled is None:
        return torch.zeros(batch, blocks, dtype=torch.bool)
    if controlled.ndim != 2 or len(controlled) != batch or controlled.shape[1] < blocks:
        raise ValueError(f"controlled must have shape ({batch}, {blocks} or more), got {tuple(controlled.shape)}")
    return controlled.to(torch.bool)


def blocks_and_landmarks(phase: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Number of the block of each position of a window, and whether the position is a landmark.

    phase: (B,). Returns two (B, length) tensors, int64 and bool; the first block of a window is block 0.
    """
    position = phase[:, None] + torch.arange(length, device=phase.device)
    return position // (block_size + 1), position % (block_size + 1) == block_size


def insert_landmarks(tokens: Tensor, position: int, block_size: int, landmark: int) -> tuple[Tensor, Tensor]:
    """Insert landmarks into raw tokens that follow `position` stream positions.

    Args:
        tokens: (B, n), raw ids.
        position: stream positions before them, landmarks included.
        block_size: ℓ, normal tokens of a block.
        landmark: id of the landmark token.

    Returns the ids with landmarks (B, T), and the (n,) indices of the raw tokens among them. With ℓ=2, starting at
    position 0::

        raw        a b   c d   e
        stream     a b L c d L e          raw at 0 1 3 4 6

    A landmark comes right after its block, also where the tokens end there. So the result ends on a landmark whenever
    the last block is complete, and `position` is never the position of a landmark.
    """
    fed = position - position // (block_size + 1)
    count = tokens.shape[1]
    raw = fed + torch.arange(count, device=tokens.device)
    at = raw + raw // block_size - position
    total = fed + count + (fed + count) // block_size - position
    with_landmarks = tokens.new_full((tokens.shape[0], total), landmark)
    with_landmarks[:, at] = tokens
    return with_landmarks, at
