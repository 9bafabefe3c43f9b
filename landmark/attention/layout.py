"""Where blocks begin: the arithmetic of landmarks in a stream and in a window cut from it.

After every ℓ = ``block_size`` normal tokens of a stream stands one landmark, so a block with its landmark is
W = ℓ+1 positions wide. A window may be cut anywhere; its *phase* is the stream position of its first token
modulo W, the number of tokens missing from its first block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_phase(phase: Tensor | None, batch: int, block_size: int) -> Tensor:
    """Return the phase as a (B,) int64 tensor where it is, zeros on the CPU for None.

    Raises ValueError for a wrong shape or a value outside 0…block_size (only looked at where `can_look`).
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
    """Whether values may decide what happens: on the CPU, where looking stalls no device, and not while compiling."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def most_blocks(length: int, block_size: int) -> int:
    """Blocks that a window can have a part of, whatever its phase."""
    return (block_size + length - 1) // (block_size + 1) + 1


def check_controlled(controlled: Tensor | None, batch: int, length: int, block_size: int) -> Tensor:
    """Return (B, blocks), whether each block's landmark is controlled; None: no landmark is.

    Raises ValueError where it is not said of every block that a window of `length` can have, or of each sample.
    """
    blocks = most_blocks(length, block_size)
    if controlled is None:
        return torch.zeros(batch, blocks, dtype=torch.bool)
    if controlled.ndim != 2 or len(controlled) != batch or controlled.shape[1] < blocks:
        raise ValueError(f"controlled must have shape ({batch}, {blocks} or more), got {tuple(controlled.shape)}")
    return controlled.to(torch.bool)


def blocks_and_landmarks(phase: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Number of the block of each position of a window, and whether a landmark stands there.

    phase: (B,). Returns two (B, length) tensors, int64 and bool; the first block of a window is block 0.
    """
    position = phase[:, None] + torch.arange(length, device=phase.device)
    return position // (block_size + 1), position % (block_size + 1) == block_size


def insert_landmarks(tokens: Tensor, position: int, block_size: int, landmark: int) -> tuple[Tensor, Tensor]:
    """Insert landmarks into raw tokens that follow `position` stream positions.

    tokens: (B, n) raw ids. Returns the ids with landmarks (B, T), and the (n,) indices of the raw tokens among
    them. With ℓ=2, starting at position 0::

        raw        a b   c d   e
        stream     a b L c d L e          raw at 0 1 3 4 6

    A landmark is put right after its block, also where the tokens end there: what is returned ends on a landmark
    whenever the last block is complete, so `position` never points at one.
    """
    fed = position - position // (block_size + 1)
    count = tokens.shape[1]
    raw = fed + torch.arange(count, device=tokens.device)
    at = raw + raw // block_size - position
    total = fed + count + (fed + count) // block_size - position
    with_landmarks = tokens.new_full((tokens.shape[0], total), landmark)
    with_landmarks[:, at] = tokens
    return with_landmarks, at
