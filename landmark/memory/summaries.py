"""A memory for texts without landmarks: what stands for a block is a summary of its keys, and no training is needed.

A query of a pretrained model reads the last tokens and the blocks that a selector chooses by their mean keys, all in
one softmax: it is the model's own attention to fewer keys. That is a gate with α = 1 and a landmark whose score is 0,
so the weight of a block is the sum of its tokens' weights. Where k is the number of blocks, nothing is left out.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from landmark.attention import Grouped
from landmark.attention.flash import attention_forward, merged
from landmark.attention.keys import Keys
from landmark.attention.rotary import rotate
from landmark.memory.memory import Memory
from landmark.memory.question import Question
from landmark.memory.select import MeanKeys, SecondLook, Selector, WithFirst
from landmark.utils.errors import UserError


class SummaryMemory(Memory):
    """Blocks of ℓ tokens without a landmark among them, and at least the last `window` tokens as they are.

    1. *Attend locally*: causal attention to the chunk and to the pending tokens before it.
    2. *Choose*, 3. *read* and 4. *merge* as in `Memory`, with the score 0 for all landmarks and α = 1.

    `commit` keeps the last `window` tokens pending, or up to ℓ − 1 more, and stores older ones in blocks.
    """

    def __init__(
        self,
        block_size: int,
        k: int = 32,
        *,
        window: int = 512,
        select: Selector = WithFirst(1, SecondLook(64, MeanKeys("per_token_and_group"))),  # noqa: B008 (these are frozen)
        keys: Keys | None = None,
        **settings: Any,
    ):
        """Start with nothing read.

        Args:
            block_size: ℓ, tokens of a block, and places in the text.
            k: blocks that a query retrieves.
            window: tokens before a query that it sees as they are; it sees those of its chunk and up to ℓ − 1 more.
            select: chooses the blocks.
            keys: how keys are made, with landmark="none"; None: with rotary positions.
            settings: positions, store, scoring, backend and observer, as of `Memory`.

        Raises UserError for a number out of range.
        """
        if window < 0:
            raise UserError(f"window={window}: must be at least 0 tokens")
        self.window = window
        keys = Keys(landmark="none") if keys is None else keys
        super().__init__(block_size, k, select=select, keys=keys, gate=Grouped(1.0), **settings)

    @property
    def width(self) -> int:
        return self.block_size

    @property
    def tokens_read(self) -> int:
        return self.position

    def complete_blocks(self, tokens: int) -> int:
        return max(0, tokens - self.window) // self.width

    def closed_blocks(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))  # a landmark whose score is 0

    def attend_to_pending(self, question: Question, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries = question.queries
        pending = k.shape[2] - queries.q.shape[2]
        factors = queries.rotary(0, k.shape[2], queries.q)
        q, k = rotate(queries.q, factors[pending:]), rotate(k, factors)
        scoring = {"scale": queries.scale, "softcap": question.softcap}
        if q.shape[2] == 1:
            return _attend_all(q, k, v, **scoring)
        own_k, own_v = (x[:, :, pending:].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        own = attention_forward(q, own_k, own_v, causal=True, **scoring)
        return merged(_attend_all(q, k[:, :, :pending], v[:, :, :pending], **scoring), own) if pending else own


def _attend_all(q: Tensor, k: Tensor, v: Tensor, **scoring: Any) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, T, d) that all see every key (B, H_kv, S, d), and its log-sum-exp (B, H, T)."""
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # heads that share keys as more queries: nothing is copied
    out, lse = attention_forward(grouped, k, v, **scoring)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
