"""What the queries of a chunk read: the chunk itself, pending tokens and blocks, and how it is merged.

n: number of queries, all T of a chunk or the selected ones. q: blocks retrieved for each query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention import Scoring, Window, landmark_attention
from landmark.attention.keys import Keys
from landmark.attention.plain import attention_forward
from landmark.attention.rotary import rotate
from landmark.memory.block_attention import Pairs, WeightedSum, attend_to_blocks, for_each_head
from landmark.memory.layer import QuerySelection, Question
from landmark.memory.store import BlockStore


def rotated_for_local_attention(question: Question, k: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Queries (B, H, T, d) and keys (B, H_kv, pending + T, d) at their positions, with means in landmarks' keys."""
    width, pending = question.block_size + 1, k.shape[2] - question.q.shape[2]
    factors = question.rotary(0, k.shape[2], question.q)
    q, k = rotate(question.q, factors[pending:]), rotate(k, factors)
    complete = k.shape[2] // width * width
    if keys.landmark != "token" and complete:
        blocks = keys.with_means(k[:, :, :complete].unflatten(2, (-1, width)), question.gate.of_landmark)
        k = torch.cat([blocks.flatten(2, 3), k[:, :, complete:]], 2)
    return q, k


def attend_locally(question: Question, k: Tensor, v: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and log-sum-exp (B, H, T) of the queries of a question.

    k, v: (B, H_kv, pending + T, d), of pending tokens and chunk, k not rotated.
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
        return attention_forward(q, k, v, scale=question.scale, softcap=question.softcap)
    layout, scoring = Window(question.block_size, prefix=pending), Scoring(question.scale, question.softcap)
    return landmark_attention(q, k, v, layout, gate=question.gate, scoring=scoring, backend=question.backend)


def read_blocks(question: Question, ages: Tensor) -> tuple[WeightedSum, Tensor]:
    """What `attend_to_blocks` returns of blocks of these ages, at their positions of attention."""
    lags = question.lags.attending(ages)
    pairs = Pairs(question.rounded, question.store, ages, lags, question.softcap, question.selected)
    return attend_to_blocks(pairs, question.gate)


def merge(
    local: tuple[Tensor, Tensor], blocks: tuple[WeightedSum, Tensor], selection: QuerySelection | None
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and weights of the blocks (B, H, n, q): a softmax of gates merges blocks and local attention.

    With a context miss token the local output is multiplied by 1 − S already, and the blocks share S. local: output
    (B, H, T, d) and log-sum-exp (B, H, T). blocks: the weighted sum of their outputs, and their gates (B, H, n, q).
    """
    (out, lse), (weighted, gates) = local, blocks
    if selection is None:
        weights = torch.cat([lse[..., None], gates.to(lse.dtype)], -1).softmax(-1).to(out.dtype)
        of_blocks = weights[..., 1:]
        return weights[..., :1] * out + weighted(of_blocks), of_blocks
    weights = gates.to(lse.dtype).softmax(-1) * selection.gather(selection.cmt_weight)[..., None]
    if selection.selected is not None:
        weights = weights * selection.selected[..., None]
    return selection.scatter_add(out, weighted(weights.to(out.dtype))), weights


def read_and_merge_fused(question: Question, ages: Tensor, local: tuple[Tensor, Tensor]) -> Tensor:
    """`read_blocks` and `merge` in one kernel, which reads the blocks where they are stored: (B, H, T, d)."""
    from landmark.memory.reading_kernels import attend_to_retrieved_blocks

    queries, store, selection, selected = question.rounded, question.store, question.selection, question.selected
    rows, blocks = None, None
    if selected is None:
        blocks = store.in_place(ages.numel() // ages.shape[1] * queries.shape[3])
    if blocks is None:
        rows, blocks = _fetched_rows(queries, store, ages, selected)
    of_store = {"added": store.added, "recent": question.lags.own, "rows": rows, "alpha": question.gate.alpha}
    tensors = queries, *blocks, store.landmarks, ages
    if selection is None:
        return attend_to_retrieved_blocks(*tensors, **of_store, local=local)
    weight = selection.gather(selection.cmt_weight)
    out = attend_to_retrieved_blocks(*tensors, **of_store, weight=weight, selected=selected)
    return selection.scatter_add(local[0], out)


def _fetched_rows(
    queries: Tensor, store: BlockStore, ages: Tensor, selected: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Fetch the blocks of the queries that retrieve: their rows (B, H, n or 1, q), and keys and values (m, ℓ, d)."""
    ages = for_each_head(ages, queries.shape[3])
    places = store.places(ages if selected is None else ages.expand(-1, -1, queries.shape[2], -1))
    if selected is None:
        blocks = store.fetch(places.flatten())
        rows = blocks.rows.view_as(places)
    else:
        blocks = store.fetch(places[selected].flatten())
        rows = torch.zeros_like(places)
        rows[selected] = blocks.rows.view(-1, places.shape[-1])
    return rows, (blocks.keys, blocks.values)
