"""Landmark keys that begin as a summary of their block: the landmark's own key plus the mean of the block's keys.

Keys are averaged after rotation, so a query's score with a landmark is the mean of its scores with the block's tokens
plus what the landmark token adds. A landmark thus finds its block before it has learned anything. `landmark_key=token`
is the paper's key, from the landmark token alone.

The gate of a block should be as large as the weight of its ℓ tokens together, exp(L) with L the log-sum-exp of their
scores; then landmark attention is full attention. With an equal score s for all, L = s + log ℓ. So the mean is short of
log ℓ, and every block weighs as much as one token. `landmark_bias` adds this to the landmark's score, as a number of
each head that is learned and begins at log ℓ. It needs a channel that positions do not turn, the last one: there
queries are 1 and keys 0, those of landmarks the bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from landmark.attention.layout import blocks_and_landmarks
from landmark.utils.window_batch import most_blocks


class BlockMeans(NamedTuple):
    """The two matrices that add to each landmark of a window the mean of its block; the same for all layers.

    average: (B, blocks, T), rows of 1/n at the n normal tokens of a block. spread: (B, T, blocks), 1 at a landmark and
    the block that it closes.
    """

    average: Tensor
    spread: Tensor

    @staticmethod
    def of_window(phase: Tensor, length: int, block_size: int, like: Tensor) -> BlockMeans:
        """The means of a window.

        Args:
            phase: (B or 1,), tokens missing from the first block.
            length: T, landmarks included.
            block_size: ℓ.
            like: a tensor with the keys' type and device.
        """
        block, is_landmark = blocks_and_landmarks(phase.to(like.device), length, block_size)
        blocks = torch.arange(most_blocks(length, block_size), device=like.device)
        belongs = block[:, None] == blocks[:, None]
        normal = belongs & ~is_landmark[:, None]
        average = normal.to(like.dtype) / normal.sum(-1, keepdim=True).clamp(min=1)
        spread = (belongs & is_landmark[:, None]).transpose(1, 2)
        return BlockMeans(average, spread.to(like.dtype))

    def add_to(self, k: Tensor) -> Tensor:
        """k: (B, H, T, d), rotated. Returns the same with the means added at landmarks."""
        return k + self.spread[:, None] @ (self.average[:, None] @ k)


def bias_landmarks(q: Tensor, k: Tensor, is_landmark: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys that add a bias to the scores of landmarks, by their last channel.

    Args:
        q: (B, H, T, d).
        k: (B, H_kv, T, d).
        is_landmark: (B or 1, T), bool.
        bias: (H_kv,), added to scores that are divided by √d.

    Returns tensors of the same shapes.
    """
    last = k.new_zeros(k.shape[-1])
    last[-1] = 1  # made on the device: nothing is copied to it
    at_landmarks = is_landmark[:, None, :, None] * (bias * k.shape[-1] ** 0.5)[:, None, None]
    return torch.addcmul(last, q, 1 - last), torch.addcmul(k * (1 - last), at_landmarks.to(k.dtype), last)


def add_means(blocks: Tensor) -> Tensor:
    """Complete blocks (…, W, d) of rotated keys, the landmark last, with the mean of the others added to it."""
    return torch.cat([blocks[..., :-1, :], blocks[..., -1:, :] + blocks[..., :-1, :].mean(-2, keepdim=True)], -2)
