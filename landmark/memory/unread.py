"""Blocks that a query does not read take part as one place each: their mean key with log ℓ, and their mean value.

A softmax over fewer keys gives what it reads too much weight. If all keys of a block were alike, one place with the
score of their mean and log ℓ would weigh as the block does, and nothing would be left out; as they differ, it weighs
less. It costs two products with 1/ℓ as many keys as there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from landmark.attention.flash import merged
from landmark.memory.query_tiles import for_each_head
from landmark.memory.question import Question
from landmark.memory.select.scores import parts, summary_scores
from landmark.memory.select.selector import Choice


def with_unread(question: Question, choice: Choice, local: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to the places of the unread blocks, merged with local attention.

    Args:
        question, choice: the queries, and the blocks that they read; the store has "means" and "mean_values".
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention.

    Returns output and log-sum-exp of both.
    """
    store, queries, group = question.store, question.exact, question.queries.q.shape[1] // question.store.kv_heads
    if choice.ages.shape[-1] == len(store):
        return local
    keys, values = store.summaries["means"], store.summaries["mean_values"][:, :, : len(store)]
    rows = store.rows(for_each_head(choice.ages, queries.shape[3])).expand(-1, -1, queries.shape[2], -1)
    out, lse = torch.empty_like(local[0]), torch.empty_like(local[1])
    buffer = queries.new_empty(0)
    for kv, part in parts(question, "per_token_and_head", store.kv_heads):
        heads = slice(kv.start * group, kv.stop * group)
        q = queries[:, :, part, heads]
        size = q[0, ..., 0].numel() * len(store)
        buffer = buffer if buffer.numel() >= size else queries.new_empty(size)
        scores, _, _ = summary_scores(question, q, keys[:, kv], 0, buffer[:size])
        scores = scores.scatter_(-1, rows[:, heads, part], -math.inf)
        of_rest = scores.logsumexp(-1) + math.log(question.block_size)
        found = (scores.softmax(-1).unflatten(1, (-1, group)) @ values[:, kv, None]).flatten(1, 2)
        own = local[0][:, heads, part], local[1][:, heads, part]
        out[:, heads, part], lse[:, heads, part] = merged((found.to(out.dtype), of_rest.to(lse.dtype)), own)
    return out, lse
