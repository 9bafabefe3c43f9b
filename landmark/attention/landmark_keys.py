"""Landmark keys that begin as a summary of their block: the landmark's own key plus weighted keys of its tokens.

A block should weigh as much as its tokens do together in full attention: exp(L), with L the log-sum-exp of a query's
scores with them. For any weights p that sum to 1, with entropy H(p),

    L ≥ Σ p_i (q·k_i/√d) + H(p),

and both are equal where p is the softmax of these scores. The right-hand side is linear in the query, so one key for a
block can give it: Σ p_i k_i, and H(p) as a bias. `model.landmark_key` chooses p:

- "token": the landmark's own key alone, as in the paper.
- "mean": p is uniform, so H(p) = log ℓ.
- "pooled": p is the softmax of the *landmark's* query with the block's keys. The landmark learns which tokens later
  queries will look for; a few of them then count as much as they do in full attention, where a mean divides their
  scores by ℓ. Source: chunk keys with an entropy bias, HiLS (arXiv 2607.02980).

Keys are summed after rotation. With equal scores landmark attention then *is* full attention, before anything is
learned. The bias needs a channel that positions do not turn, the last one: there queries are 1 and keys 0, those of
landmarks the bias (`model.landmark_bias`, which adds a learned number of each head: at first log ℓ, or with the entropy
0). With `model.joint_softmax=α` a part α of L is added as it is, so only 1 − α of the summary, of the entropy and of
log ℓ are: the `share` of the functions here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention.layout import blocks_and_landmarks
from landmark.utils.window_batch import most_blocks


class WindowBlocks(NamedTuple):
    """Which tokens of a window belong to which block; the same for all layers. Each is (B, blocks, T).

    normal: bool, the normal tokens of a block. average: the same, divided by their number. landmark: 1 at the landmark
    that closes a block.
    """

    normal: Tensor
    average: Tensor
    landmark: Tensor

    @staticmethod
    def of(phase: Tensor, length: int, block_size: int, like: Tensor, empty: Tensor | None = None) -> WindowBlocks:
        """The blocks of a window.

        Args:
            phase: (B or 1,), tokens missing from the first block.
            length: T, landmarks included.
            block_size: ℓ.
            like: a tensor with the keys' type and device.
            empty: (B, T), bool, places without a token; None: there are none.
        """
        block, is_landmark = blocks_and_landmarks(phase.to(like.device), length, block_size)
        blocks = torch.arange(most_blocks(length, block_size), device=like.device)
        belongs = block[:, None] == blocks[:, None]
        normal = belongs & ~is_landmark[:, None]
        if empty is not None:
            normal = normal & ~empty[:, None]
        average = normal.to(like.dtype) / normal.sum(-1, keepdim=True).clamp(min=1)
        return WindowBlocks(normal, average, (belongs & is_landmark[:, None]).to(like.dtype))

    def add_means(self, k: Tensor, share: float = 1.0) -> Tensor:
        """Keys (B, H_kv, T, d), rotated, with `share` of the mean of its block added to each landmark."""
        return torch.add(k, self.landmark.transpose(1, 2)[:, None] @ (self.average[:, None] @ k), alpha=share)

    def add_pooled(self, q: Tensor, k: Tensor, share: float = 1.0) -> Tensor:
        """Keys with `share` of the pooled keys of its block, and of their entropy, added to each landmark.

        q: (B, H, T, d), k: (B, H_kv, T, d), both rotated. Where query heads share keys, their mean query pools.
        """
        landmark = self.landmark[:, None]
        weights, entropy = pooling(landmark @ shared_queries(q, k.shape[1]), k, self.normal[:, None])
        return torch.add(k, landmark.transpose(2, 3) @ with_bias(weights @ k, entropy), alpha=share)


def shared_queries(q: Tensor, kv_heads: int) -> Tensor:
    """The mean query of the heads that share keys: (B, H, T, d) → (B, H_kv, T, d)."""
    return q if q.shape[1] == kv_heads else q.unflatten(1, (kv_heads, -1)).mean(2)


def pooling(q: Tensor, k: Tensor, normal: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights of a block's tokens by its landmark's query, (…, n, T), and their entropy in nats, (…, n).

    Args:
        q: (…, n, d), the queries of landmarks, rotated.
        k: (…, T, d), rotated.
        normal: (…, n, T), bool, the normal tokens of each block; the others get no weight. None: all T are. A block
            without any has the entropy 0.
    """
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if normal is not None:
        scores = scores.masked_fill(~normal, torch.finfo(scores.dtype).min / 2)
    logs = scores.log_softmax(-1)
    weights = logs.exp() if normal is None else logs.exp() * normal
    return weights.to(k.dtype), -(weights * logs).sum(-1).to(k.dtype)


def with_bias(keys: Tensor, bias: Tensor) -> Tensor:
    """Keys (…, d) whose last channel adds a bias (…) to the scores (divided by √d) of queries with a 1 there."""
    return torch.cat([keys[..., :-1], keys[..., -1:] + bias[..., None] * keys.shape[-1] ** 0.5], -1)


def bias_landmarks(q: Tensor, k: Tensor, is_landmark: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys that add a bias to the scores of landmarks, by their last channel.

    Args:
        q: (B, H, T, d).
        k: (B, H_kv, T, d).
        is_landmark: (B or 1, T), bool; None: none of them is.
        bias: (H_kv,), added to scores that are divided by √d.

    Returns tensors of the same shapes.
    """
    if is_landmark is None:
        return F.pad(q[..., :-1], (0, 1), value=1.0), F.pad(k[..., :-1], (0, 1))
    last = k.new_zeros(k.shape[-1])
    last[-1] = 1  # made on the device: nothing is copied to it
    at_landmarks = is_landmark[:, None, :, None] * (bias * k.shape[-1] ** 0.5)[:, None, None]
    return torch.addcmul(last, q, 1 - last), torch.addcmul(k * (1 - last), at_landmarks.to(k.dtype), last)


def block_weights(q: Tensor, blocks: Tensor) -> Tensor:
    """The pooling weights of complete blocks.

    Args:
        q: (B, H, n, d), the rotated query of each block's landmark.
        blocks: (B, H_kv, n, W, d), rotated keys, the landmark last.

    Returns (B, H_kv, n, ℓ).
    """
    return pooling(shared_queries(q, blocks.shape[1])[..., None, :], blocks[..., :-1, :])[0][..., 0, :]


def add_summaries(
    blocks: Tensor, weights: Tensor | None = None, sizes: Tensor | None = None, share: float = 1.0
) -> Tensor:
    """Complete blocks (…, n, W, d) of rotated keys, the landmark last, with their summary added to it.

    Args:
        blocks: (…, n, W, d).
        weights: (…, n, ℓ), of the tokens, whose entropy is added as a bias; None: the mean, without a bias.
        sizes: (n,), tokens of each block, which are at its first places; for the mean. None: ℓ.
        share: how much of the summary is added.
    """
    tokens, landmark = blocks[..., :-1, :], blocks[..., -1:, :]
    if weights is None:
        summary = mean_of_tokens(tokens, sizes)[..., None, :]
    else:
        weights = weights.to(blocks.dtype)
        entropy = -torch.xlogy(weights, weights).sum(-1, keepdim=True)
        summary = with_bias(weights[..., None, :] @ tokens, entropy)
    return torch.cat([tokens, torch.add(landmark, summary, alpha=share)], -2)


def mean_of_tokens(tokens: Tensor, sizes: Tensor | None) -> Tensor:
    """The mean of each block's keys or values: (…, n, ℓ, d) → (…, n, d). sizes: (n,), the first ones count; None: ℓ."""
    if sizes is None:
        return tokens.mean(-2)
    counted = torch.arange(tokens.shape[-2], device=tokens.device) < sizes[:, None]
    average = counted / sizes[:, None].to(tokens.dtype)
    return (average[:, None] @ tokens)[..., 0, :]
