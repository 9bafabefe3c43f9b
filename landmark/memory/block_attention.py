"""Attention of queries to their retrieved blocks, block by block, and the merge of the outputs.

S: number of lags. n: number of queries, all T of a chunk or the selected ones. q: blocks retrieved for each query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from landmark.attention import Grouped
from landmark.attention.fused.retrieved_blocks import attend_to_retrieved_blocks
from landmark.memory.query_selection import QuerySelection
from landmark.memory.query_tiles import QueryTiles, for_each_head
from landmark.memory.question import Question
from landmark.memory.select import Choice
from landmark.memory.shared_blocks import attend_shared
from landmark.memory.store import BlockStore

WeightedSum = Callable[[Tensor], Tensor]
"""Of weights (B, H, n, q) of blocks, the sum of the blocks' outputs (B, H, n, d)."""


def read_blocks(question: Question, choice: Choice) -> tuple[WeightedSum, Tensor]:
    """Attend to each block of a choice separately.

    Args:
        question: that is answered.
        choice: which blocks.

    Returns the weighted sum of the blocks' outputs, and their gates (B, H, n, q): the score of the landmark, with the
    part α of the log-sum-exp of the tokens' scores. Both are 0 for queries that do not retrieve.
    """
    ages, selected = choice.ages, None if question.selection is None else question.selection.selected
    lags = question.lags.attending(ages)
    scoring = question.softcap, question.gate, choice.gates
    return attend_to_blocks(question.rounded, question.store, ages, lags, selected, *scoring)


def attend_to_blocks(
    queries: Tensor,
    store: BlockStore,
    ages: Tensor,
    lags: Tensor,
    selected: Tensor | None = None,
    softcap: float | None = None,
    gate: Grouped = Grouped(),  # noqa: B008 (it is frozen)
    gates: Tensor | None = None,
) -> tuple[WeightedSum, Tensor]:
    """`read_blocks` of these tensors.

    Args:
        queries: (S, B, n, H, d), scaled, and rotated for lag 1…S.
        store: the layer's blocks.
        ages: (B, H, H_kv or 1, n or 1, q), the retrieved blocks; 1 is the newest block.
        lags: shape of ages, the lag of each block (positions.py).
        selected: (B, H, n), bool, queries that retrieve; None: all do.
        softcap: cap of the scores, and of the gates; None: there is none.
        gate: how a block weighs.
        gates: (B, H, n, q), where they are computed already.
    """
    if selected is not None:
        ages, lags = (for_each_head(x, selected.shape[1]).expand(*selected.shape, -1) for x in (ages, lags))
    elif ages.shape[2] == 1 and not (gate.alpha and queries.requires_grad):  # plain attention's is without a gradient
        outs, of_blocks = attend_shared(queries, store, ages, lags, softcap, gate)
        return partial(_summed, outs), of_blocks if gates is None else gates
    elif ages.shape[2] < queries.shape[2]:
        ages, lags = (x.expand(-1, -1, queries.shape[2], -1) for x in (ages, lags))
    tiles = QueryTiles(queries, store, ages, lags, selected, softcap)
    out, of_tiles = tiles.empty(tiles.dim), tiles.empty(dtype=store.landmarks.dtype) if gates is None else None
    for part in tiles.parts():
        out[part.tiles] = tiles.split(torch.bmm(part.scores.softmax(-1), part.blocks.read_values(part.buffer)))
        if of_tiles is not None:
            of_tiles[part.tiles] = tiles.split(tiles.gates(part, gate))
    if of_tiles is not None:
        gates = tiles.of_queries(of_tiles).squeeze(-1)
    assert gates is not None
    return partial(tiles.weighted_sum, out), gates


def merge(
    local: tuple[Tensor, Tensor], blocks: tuple[WeightedSum, Tensor], selection: QuerySelection | None
) -> tuple[Tensor, Tensor]:
    """Merge the outputs of the blocks and of local attention, by a softmax of the gates.

    With a context miss token the local output is multiplied by 1 − S already, and the blocks share S.

    Args:
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention.
        blocks: the weighted sum of their outputs, and their gates (B, H, n, q).
        selection: the n queries; None: the model has no context miss token.

    Returns the output (B, H, T, d) and the weights of the blocks (B, H, n, q).
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
    """`read_blocks` and `merge` in one kernel, which reads the blocks where they are stored: (B, H, T, d).

    Args: as in these.
    """
    queries, store, selection = question.rounded, question.store, question.selection
    selected = None if selection is None else selection.selected
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
    _, batch, count, heads, _ = queries.shape
    ages = for_each_head(ages, heads)
    if selected is not None:
        ages = ages.expand(-1, -1, count, -1)
    samples = torch.arange(batch, device=ages.device)[:, None, None, None]
    kv_heads = torch.arange(heads, device=ages.device)[None, :, None, None] * store.kv_heads // heads
    places = (samples * store.kv_heads + kv_heads) * store.capacity + store.rows(ages)  # (B, H, n or 1, q)
    if selected is None:
        blocks = store.fetch(places.flatten())
        rows = blocks.rows.view_as(places)
    else:
        blocks = store.fetch(places[selected].flatten())
        rows = torch.zeros_like(places)
        rows[selected] = blocks.rows.view(-1, places.shape[-1])
    return rows, (blocks.keys, blocks.values)


def _summed(outs: Tensor, weights: Tensor) -> Tensor:
    """Outputs (B, C, q, H/C, T, d) of blocks, summed with weights (B, H, T, q): (B, H, T, d)."""
    own = weights.unflatten(1, (outs.shape[1], -1))
    return torch.einsum("bcgtq,bcqgtd->bcgtd", own, outs.to(weights.dtype)).flatten(1, 2)
