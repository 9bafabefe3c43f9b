"""Attention of a chunk to itself and to the pending tokens before it: the first step of `Memory.attend`."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention import Scoring, Window, landmark_attention
from landmark.attention.flash import attention_forward
from landmark.attention.keys import Keys
from landmark.attention.rotary import rotate
from landmark.memory.question import Question


def rotated_for_local_attention(question: Question, k: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Queries (B, H, T, d) and keys (B, H_kv, pending + T, d) at their positions, with means in landmarks' keys.

    Args: as of `attend_locally`.
    """
    queries, width = question.queries, question.block_size + 1
    pending = k.shape[2] - queries.q.shape[2]
    factors = queries.rotary(0, k.shape[2], queries.q)
    q, k = rotate(queries.q, factors[pending:]), rotate(k, factors)
    complete = k.shape[2] // width * width
    if keys.landmark != "token" and complete:
        blocks = keys.with_means(k[:, :, :complete].unflatten(2, (-1, width)), question.gate.of_landmark)
        k = torch.cat([blocks.flatten(2, 3), k[:, :, complete:]], 2)
    return q, k


def attend_locally(question: Question, k: Tensor, v: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and log-sum-exp (B, H, T) of the queries of a question.

    Args:
        question: with the queries.
        k, v: (B, H_kv, pending + T, d), of pending tokens and chunk, k not rotated.
        keys: how keys are made.
    """
    q, k = rotated_for_local_attention(question, k, keys)
    pending, width = k.shape[2] - q.shape[2], question.block_size + 1
    seen, total = (tokens - tokens // width for tokens in (pending + 1, k.shape[2]))
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if question.backend != "triton" and k.shape[2] <= width and seen == total and not needs_gradient:
        # While generating, all queries see the same normal tokens, and no landmark.
        k, v = k[:, :, :total], v[:, :, :total]
        if (group := q.shape[1] // k.shape[1]) > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return attention_forward(q, k, v, scale=question.queries.scale, softcap=question.softcap)
    layout, scoring = Window(question.block_size, prefix=pending), Scoring(question.queries.scale, question.softcap)
    return landmark_attention(q, k, v, layout, gate=question.gate, scoring=scoring, backend=question.backend)
