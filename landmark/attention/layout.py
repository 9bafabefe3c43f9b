"""Where blocks begin: the arithmetic of landmarks in a stream and in a window cut from it.

After every ℓ = `block_size` normal tokens of a stream there is one landmark, so a block with its landmark is W = ℓ+1
positions wide. A window may be cut anywhere. Its *phase* is the stream position of its first token modulo W, which is
the number of tokens missing from its first block.

Where blocks end early (`landmark.utils.block_places`) the places between their last token and their landmark are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.utils.block_ends import BlockEnds
from landmark.utils.block_places import closed_blocks, places_of_tokens
from landmark.utils.window_batch import most_blocks


def check_phase(phase: Tensor | None, batch: int, block_size: int, device: torch.device | str = "cpu") -> Tensor:
    """The phase as an integer tensor (B,).

    Args:
        phase: (B,); stays on its device. None: zeros.
        batch: B.
        block_size: ℓ, normal tokens of a block.
        device: of these zeros; they are made there, because a copy to the device would wait for it.

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
    """Whether the context miss token controls each block's landmark, (B, blocks), bool, on the device.

    Args:
        controlled: (B, blocks or more); None: no landmark is controlled.
        batch: B.
        length: tokens of a window, landmarks included.
        block_size: ℓ, normal tokens of a block.
        device: of the result.

    Raises ValueError where a sample or a block is missing.
    """
    blocks = most_blocks(length, block_size)
    if controlled is None:
        return torch.zeros(batch, blocks, dtype=torch.bool, device=device)
    if controlled.ndim != 2 or len(controlled) != batch or controlled.shape[1] < blocks:
        raise ValueError(f"controlled must have shape ({batch}, {blocks} or more), got {tuple(controlled.shape)}")
    return controlled.to(device, torch.bool, non_blocking=True)


def blocks_and_landmarks(phase: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """For each position of a window the number of its block, from 0, and whether it holds a landmark.

    phase: (B,). Returns two tensors (B, length), int64 and bool.
    """
    position = phase[:, None] + torch.arange(length, device=phase.device)
    return position // (block_size + 1), position % (block_size + 1) == block_size


def insert_landmarks(tokens: Tensor, position: int, block_size: int, landmark: int) -> tuple[Tensor, Tensor]:
    """Insert landmarks into raw tokens.

    Args:
        tokens: (B, n), raw ids.
        position: stream positions before the tokens, landmarks included.
        block_size: ℓ, normal tokens of a block.
        landmark: id of the landmark token.

    Returns the ids with landmarks (B, T), and the indices (n,) of the raw tokens among them. With ℓ = 2, from position
    0 on::

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


class Placed(NamedTuple):
    """Raw tokens at the places of blocks that may end early.

    tokens: (B, T) ids, the landmark's at landmarks and empty places. places: (B, n), where the raw tokens stand. empty:
    (B, T), bool.
    """

    tokens: Tensor
    places: Tensor
    empty: Tensor


def place_tokens(tokens: Tensor, filled: int, ends: BlockEnds, landmark: int) -> Placed:
    """Put raw tokens into blocks that end where the rule says; a landmark follows its block at once.

    Args:
        tokens: (B, n), raw ids.
        filled: tokens of the first block before them, in each sample.
        ends: the rule.
        landmark: id of the landmark token.

    Texts of a batch that take fewer places than the longest one have empty places behind them.
    """
    width = ends.block_size + 1
    found = []
    for text in tokens.cpu().numpy():
        found.append(places_of_tokens(closed_blocks(text, ends, filled), len(text), width, filled))
    places = torch.stack([torch.from_numpy(at) for at, _ in found]).to(tokens.device)
    total = max(count for _, count in found)
    placed = tokens.new_full((len(tokens), total), landmark).scatter(1, places, tokens)
    is_landmark = (torch.arange(total, device=tokens.device) + filled) % width == ends.block_size
    is_token = torch.zeros_like(placed, dtype=torch.bool).scatter(1, places, torch.ones_like(places, dtype=torch.bool))
    return Placed(placed, places, ~is_token & ~is_landmark)


def sizes_of_blocks(empty: Tensor, phase: Tensor, block_size: int) -> Tensor:
    """The tokens of each block of windows, which stand at its first places, (B, blocks), int32; ℓ where none is empty.

    Args:
        empty: (B, T), bool.
        phase: (B,), places of its first block before each window; they count as tokens.
        block_size: ℓ.
    """
    width, length = block_size + 1, empty.shape[1]
    place = phase.to(empty.device)[:, None] + torch.arange(length, device=empty.device)
    sizes = phase.new_full((len(empty), (length + block_size) // width + 1), block_size, device=empty.device)
    first = torch.where(empty, place % width, block_size).to(sizes.dtype)
    return sizes.scatter_reduce(1, (place // width).long(), first, "amin").to(torch.int32)


def log_fullness(empty: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """log(n / ℓ) at each place that follows the n tokens of a block and its empty places, so at landmarks: (B, T).

    empty: (B, T), bool. block_size: ℓ. dtype: of the result.
    """
    place = torch.arange(empty.shape[1], device=empty.device)
    latest = F.pad(torch.where(empty, -1, place).cummax(1).values[:, :-1], (1, 0), value=-1)
    empty_places = (place - 1 - latest).clamp(max=block_size - 1)  # behind a text of a batch there are more
    return torch.log1p(-empty_places.to(dtype) / block_size)
