"""Landmark attention of a window whose tokens are shared out over processes, by DeepSpeed-Ulysses (Jacobs et al. 2023).

Each of n processes has T/n tokens of every head. Queries, keys and values are exchanged, so that each has all T tokens
of H/n heads; then any backend computes the heads as usual, and the outputs are exchanged back::

    tokens    a b | c d        head 1   a b c d        a b | c d
    head 1   process 1 | 2  →  process 1            →
    head 2   process 1 | 2     head 2   a b c d
                               process 2

A process sends (n−1)/n of its share of queries, keys, values and outputs; ring attention (Liu et al. 2023) sends the
keys and values n−1 times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from landmark.utils.ranks import Ranks


def attention_over_ranks(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, ranks: Ranks
) -> Tensor:
    """Attention to a whole window, of which each process has T/n tokens, in the order of the processes.

    Args:
        attend: attention of some heads to the whole window, with queries (B, H/n, T, d) and keys and values
            (B, H_kv/n, T, d): a partial `landmark.attention.landmark_attention` or `causal_attention`.
        q: (B, H, T/n, d), rotated.
        k, v: (B, H_kv, T/n, d), rotated.
        ranks: the processes.

    Returns (B, H, T/n, d), with gradients for q, k and v. Raises ValueError if the processes cannot share the heads
    evenly.
    """
    for x in (q, k):
        if x.shape[1] % ranks.size:
            raise ValueError(f"{x.shape[1]} heads cannot be shared evenly by {ranks.size} processes")
    heads = (_heads_of_all_tokens(x, ranks) for x in (q, k, v))
    return _tokens_of_all_heads(attend(*heads), ranks)


def _heads_of_all_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, H, T/n, d) → (B, H/n, T, d)."""
    parts = torch.stack(x.chunk(ranks.size, 1))
    return torch.cat(ranks.exchanged(parts).unbind(), 2)


def _tokens_of_all_heads(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, H/n, T, d) → (B, H, T/n, d)."""
    parts = torch.stack(x.chunk(ranks.size, 2))
    return torch.cat(ranks.exchanged(parts).unbind(), 1)
