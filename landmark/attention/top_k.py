"""Attention to the best few blocks within a window, as a query reads a memory: its own block and k earlier ones.

A model that is trained with all blocks of a window need not choose: the weight of a right block stays visible beside
many wrong ones. With top_k it learns to put the right blocks first. The other blocks have no weight, and no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_best(gates: Tensor, top_k: int, dim: int) -> Tensor:
    """Put −∞ in the scores of landmarks, in place, but for the highest of each query; those that tie with them stay.

    Args:
        gates: scores, −∞ for blocks that the query does not see.
        top_k: how many stay, at least 1; all where there are no more.
        dim: the dimension of the blocks.
    """
    if gates.shape[dim] > top_k:
        least = gates.topk(top_k, dim).values.narrow(dim, top_k - 1, 1)
        gates.masked_fill_(gates < least, -torch.inf)
    return gates
