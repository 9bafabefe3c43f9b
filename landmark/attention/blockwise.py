"""Landmark attention in tiles of whole blocks: exact, O(T·d + T·T/W) memory, no T×T tensor.

A tile holds the scores of a few blocks of queries against all blocks that they see, as (N, block, offset, query):

1. inner: log-sum-exp over the offsets of each block, without landmarks and empty places; causal in the query's own
   block.
2. gates: the landmark's score for a gated block, the inner log-sum-exp for the query's own block and for others that
   are local, which so share one softmax. With top_k only the highest of the landmarks' scores stay.
   With a hierarchy these are adjusted before (hierarchy.py). With a joint softmax a part of the inner is
   added to each landmark's score.
3. outer: softmax of the gates over blocks, and over the context miss token if there is one (context_miss_token.py).
4. weights: exp(score − inner) · outer.

No running maximum is needed. The backward pass computes the weights again, from two numbers kept for each query and
block. The mean that the gradient of the inner softmax subtracts is a sum over offsets of one tile. README.md has the
derivation. Scores and log-sum-exps are in units of log 2, because exp2 is the fastest exponential.

The windows of a batch are cut at different phases. Each is padded so that the blocks of all line up (alignment.py):
`phase` rows, the window, rows up to a whole block. N: sequences, the heads of some samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from landmark.attention.alignment import BlockAlignment, align_blocks
from landmark.attention.blockwise_tiles import Tile, product
from landmark.attention.context_miss_token import share_cmt_weight, shared_weight_gradient
from landmark.attention.hierarchy import adjust, landmark_scores
from landmark.attention.inputs import AttentionInputs
from landmark.attention.softcap import slope
from landmark.attention.top_k import keep_best
from landmark.attention.workspace import Workspace, workspace
from landmark.utils.constants import LOG2_E

TILE_ROWS = 102  # queries of a tile, in whole blocks
TILE_SIZE = 1 << 20  # scores of the sequences computed together; they fit into the processor's cache


def _tiles(alignment: BlockAlignment) -> list[Tile]:
    """All tiles, those of the latest queries first."""
    count = max(1, TILE_ROWS // alignment.width)
    return [
        Tile(alignment, max(alignment.first, stop - count), stop)
        for stop in range(alignment.blocks, alignment.first, -count)
    ]


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Replace x by 2^(x − largest), in place. Returns the sum over `dim`, made positive, and log2 Σ 2^x."""
    limits = torch.finfo(x.dtype)
    largest = x.amax(dim, keepdim=True).clamp_(min=limits.min)
    total = x.sub_(largest).exp2_().sum(dim)
    logsumexp = largest.squeeze(dim) + total.log2()
    return total.clamp_(min=limits.tiny), logsumexp


@dataclass(frozen=True)
class _ContextMiss:
    """The context miss token.

    values: (n, H, T), its scores in nats; in the backward pass its weights. controlled: (n, blocks), bool.
    """

    values: Tensor
    controlled: Tensor

    def pad(self, alignment: BlockAlignment, work: Workspace) -> Tensor:
        """The values, padded: (N, rows, 1)."""
        rows = (alignment.blocks - alignment.first) * alignment.width
        return alignment.pad(self.values[..., None], work("cmt", len(self.values) * alignment.heads, rows, 1))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cmt: _ContextMiss | None,
    alignment: BlockAlignment,
    scale: float,
    cap: float | None,
    work: Workspace,
    out: Tensor,
    lse: Tensor,
    top_k: int | None,
    given: Tensor | None,
    landmark_values: bool,
    joint_softmax: float,
) -> list[Tensor]:
    """Write out and lse of the samples.

    Returns two tensors (N, block, query) for each tile: the outer weights, and the shift in weights =
    exp2(score − shift), ∞ where tokens have no weight.
    """
    q, k, v = _pad_all(q, k, v, alignment, work)
    v, added = _part_not_finite(v, alignment)
    saved, padded_lse = [], work("lse", *q.shape[:2])
    if given is not None:
        given = alignment.pad(given, work("gates", *q.shape[:2], given.shape[-1]))
    padded_cmt = None if cmt is None else cmt.pad(alignment, work).mul_(LOG2_E)
    for tile in _tiles(alignment):
        scores = tile.scores(q, k, scale, cap, work)
        gates = tile.gates(scores) if given is None else tile.given_gates(given)
        weights = tile.mask(scores)
        total, inner = _exponentials(weights, 2)
        gates.masked_fill_(inner == -torch.inf, -torch.inf)  # a first block without tokens
        left_out = None
        if top_k is not None and landmark_values:
            left_out = (keep_best(gates.clone(), top_k, 1) == -torch.inf) & (gates > -torch.inf)
        elif top_k is not None:
            keep_best(gates, top_k, 1)
        if joint_softmax:
            gates.add_(inner, alpha=joint_softmax)
        cmt_gate = []
        if cmt is not None and padded_cmt is not None:
            cmt_gate = [share_cmt_weight(gates, tile.row_of(padded_cmt), tile.controlled(cmt.controlled))]
        for lag in tile.local:
            tile.own(gates, lag).copy_(tile.own(inner, lag))
        shift = inner - gates
        gates = torch.cat([gates, *cmt_gate], 1) if cmt_gate else gates
        outer_total, outer_lse = _exponentials(gates, 1)
        outer = gates.div_(outer_total[:, None])[:, : tile.end]
        spread = outer if left_out is None else outer.masked_fill(left_out, 0.0)  # over the tokens of each block
        shift = torch.where(spread > 0, shift + outer_lse[:, None], torch.inf)
        saved += [outer, shift]
        weights.mul_((spread / total)[:, :, None])
        if left_out is not None:
            weights[:, :, -1] = outer - spread
        rows = product(weights.flatten(1, 2).mT, tile.keys(v), work("rows", *tile.queries(q).shape))
        rows = rows if added is None else rows + tile.queries(added)
        alignment.unpad(rows, out, tile.row)
        torch.div(outer_lse, LOG2_E, out=tile.queries(padded_lse))
    alignment.unpad(padded_lse, lse)
    return saved


def _part_not_finite(v: Tensor, alignment: BlockAlignment) -> tuple[Tensor, Tensor | None]:
    """Padded values with 0 for NaN and ∞, and what these add to the output of each query that sees them, (N, rows, d).

    In a matrix product a NaN reaches rows in which its weight is 0 too, those of earlier queries. None: all are finite,
    or queries see later ones too.
    """
    if alignment.bidirectional or bool(v.sum().isfinite()):
        return v, None
    is_landmark = torch.arange(v.shape[1], device=v.device) % alignment.width == alignment.width - 1
    kept = v.isfinite() | is_landmark[:, None]
    return v.nan_to_num(0.0, 0.0, 0.0), v.masked_fill(kept, 0.0).cumsum(1)[:, alignment.first * alignment.width :]


def _pad_all(
    q: Tensor, k: Tensor, v: Tensor, alignment: BlockAlignment, work: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    sequences, dim = len(q) * q.shape[1], q.shape[3]
    keys = alignment.blocks * alignment.width
    queries = keys - alignment.first * alignment.width
    return (
        alignment.pad(q, work("q", sequences, queries, dim)),
        alignment.pad(k, work("k", sequences, keys, dim)),
        alignment.pad(v, work("v", sequences, keys, dim)),
    )


def _backward(
    do: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cmt: _ContextMiss | None,
    out: Tensor,
    saved: list[Tensor],
    alignment: BlockAlignment,
    scale: float,
    cap: float | None,
    work: Workspace,
    gradients: list[Tensor | None],
    landmark_values: bool,
    joint_softmax: float,
) -> None:
    """Write the samples' gradients of q, k, v, and, if given, of the context miss token's scores and of the gates."""
    to_dq, to_dk, to_dv, to_d_cmt, to_d_gates = gradients
    assert to_dq is not None
    assert to_dk is not None
    assert to_dv is not None
    row_mean = (do * out).sum(-1, keepdim=True)  # D_i
    if d_lse is not None:
        row_mean -= d_lse[..., None]  # the derivative of the log-sum-exp is the weight, from which D_i is subtracted
    q, k, v = _pad_all(q, k, v, alignment, work)
    do = alignment.pad(do, work("do", *q.shape))
    row_mean = alignment.pad(row_mean, work("row_mean", *q.shape[:2], 1))
    dk, dv, d_cmt = work("dk", *k.shape), work("dv", *v.shape), work("d_cmt", *q.shape[:2], 1)
    padded_cmt = None if cmt is None else cmt.pad(alignment, work)
    for tile, outer, shift in zip(_tiles(alignment), saved[::2], saved[1::2], strict=True):
        queries, keys, tile_do = tile.queries(q), tile.keys(k), tile.queries(do)
        scores, flattening = tile.scores(q, k, scale, cap, work), None
        if cap is not None:
            flattening = slope(scores, cap * LOG2_E, work("slope", *scores.shape))
        weights = tile.mask(scores).sub_(shift[:, :, None])
        if _is_inexact(shift):
            weights.clamp_(max=0)  # a weight is at most 1
        weights.exp2_()
        if landmark_values:
            weights[:, :, -1] = outer.masked_fill(shift.isfinite(), 0.0)
        _collect(tile, dv, product(weights.flatten(1, 2), tile_do, work("keys", *keys.shape)))
        d_scores = work("d_scores", len(q), keys.shape[1], queries.shape[1])
        d_scores = tile.blocked(product(tile.keys(v), tile_do.mT, d_scores)).mul_(weights)
        total = d_scores.sum(2)  # P_ib·D_ib
        own_mean = tile.queries(row_mean).mT  # (N, 1, query)
        mean = own_mean
        if joint_softmax != 1:
            mean = total / outer.clamp(min=torch.finfo(outer.dtype).tiny)  # D_ib
            if joint_softmax:
                mean.lerp_(own_mean.expand_as(mean), joint_softmax)
            for lag in tile.local:
                tile.own(mean, lag).copy_(tile.own(own_mean.expand_as(mean), lag))
        d_scores.addcmul_(weights, mean[:, :, None], value=-1)
        if cmt is not None and padded_cmt is not None:
            controlled = tile.controlled(cmt.controlled)
            own_mean, d_tile = shared_weight_gradient(total, own_mean, tile.row_of(padded_cmt), controlled)
            tile.row_of(d_cmt).copy_(d_tile)
        d_gates = torch.addcmul(total, outer, own_mean, value=-1)
        for lag in tile.local:
            tile.own(d_gates, lag).zero_()
        if to_d_gates is not None:
            alignment.unpad(d_gates.mT, to_d_gates[..., : tile.end], tile.row)
            d_gates = 0
        d_scores[:, :, -1] = d_gates
        if flattening is not None:
            d_scores.mul_(flattening)
        d_scores = d_scores.flatten(1, 2)
        alignment.unpad(product(d_scores.mT, keys, work("rows", *queries.shape), scale), to_dq, tile.row)
        _collect(tile, dk, product(d_scores, queries, work("keys", *keys.shape), scale))
    alignment.unpad(dk, to_dk)
    alignment.unpad(dv, to_dv)
    if to_d_cmt is not None:
        alignment.unpad(d_cmt, to_d_cmt[..., None])


def _is_inexact(shift: Tensor) -> bool:
    """Whether scores are so large that the difference to the shift is wrong by more than 1. On a GPU: always."""
    if shift.device.type != "cpu":
        return True  # reading would wait for the device
    return float(shift.masked_fill(shift == torch.inf, 0.0).abs().amax()) > 1 / torch.finfo(shift.dtype).eps


def _collect(tile: Tile, total: Tensor, part: Tensor) -> None:
    """Add a tile's gradient of keys or values to the total. The first tile has all keys, and overwrites it."""
    into = tile.keys(total)
    if tile.stop == tile.alignment.blocks:
        into.copy_(part)
    else:
        into.add_(part)


def _rows_first(x: Tensor) -> Tensor:
    """A new tensor like x, (B, H, T, d), with the memory layout (B, T, H, d) of the projections around attention."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def _chunks(samples: int, heads: int, scores: int) -> list[tuple[slice, slice]]:
    """The parts (samples, heads) of the batch, computed one by one. scores: of one sequence's largest tile."""
    sequences = max(1, TILE_SIZE // scores)
    rows, columns = max(1, sequences // heads), min(sequences, heads)
    return [
        (slice(sample, min(sample + rows, samples)), slice(head, min(head + columns, heads)))
        for sample in range(0, samples, rows)
        for head in range(0, heads, columns)
    ]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cmt_scores: Tensor | None,
        controlled: Tensor | None,
        block_size: int,
        phase: Tensor,
        prefix: int,
        scale: float,
        top_k: int | None,
        local_blocks: int,
        bidirectional: bool,
        softcap: float | None,
        gates: Tensor | None,
        empty: Tensor | None = None,
        landmark_values: bool = False,
        joint_softmax: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        (batch, heads, queries, _), width, phases = q.shape, block_size + 1, tuple(phase.tolist())
        chunks = _chunks(batch, heads, max(TILE_ROWS, width) * (prefix + queries))
        alignments = [
            align_blocks(
                width, phases[samples], prefix, queries, h.stop - h.start, q.device, local_blocks, bidirectional
            )
            for samples, h in chunks
        ]
        if empty is not None:
            alignments = [a.with_empty(empty[c[0]]) for a, c in zip(alignments, chunks, strict=True)]
        out, lse, saved = _rows_first(q), q.new_empty(q.shape[:3]), []
        work = workspace(q)
        for c, alignment in zip(chunks, alignments, strict=True):
            cmt = _context_miss(cmt_scores, controlled, c)
            of_scores, into = (scale, softcap, work), (out[c], lse[c])
            of_gates = top_k, _part(gates, c), landmark_values, joint_softmax
            saved += _forward(q[c], k[c], v[c], cmt, alignment, *of_scores, *into, *of_gates)
        cmt_weight = None if cmt_scores is None else (cmt_scores - lse).clamp(max=0).exp()
        ctx.save_for_backward(q, k, v, out, cmt_weight, controlled, *saved)
        ctx.chunks, ctx.alignments, ctx.scale, ctx.softcap = chunks, alignments, scale, softcap
        ctx.landmark_values, ctx.joint_softmax = landmark_values, joint_softmax
        ctx.gates_shape = None if gates is None else gates.shape
        ctx.set_materialize_grads(False)
        if cmt_scores is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, cmt_weight, controlled, *saved = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        d_cmt = None if cmt_weight is None else torch.empty_like(cmt_weight)
        d_gates = None if ctx.gates_shape is None else q.new_zeros(ctx.gates_shape)
        gradients = [_rows_first(q), _rows_first(k), _rows_first(v), d_cmt, d_gates]
        work = workspace(q)
        for c, alignment in zip(ctx.chunks, ctx.alignments, strict=True):
            count = 2 * len(_tiles(alignment))
            kept, saved = saved[:count], saved[count:]
            into = [_part(gradient, c) for gradient in gradients]
            cmt = _context_miss(cmt_weight, controlled, c)
            d_lse = None if grad_lse is None else grad_lse[c]
            of_scores = ctx.scale, ctx.softcap, work
            tensors = grad_out[c], d_lse, q[c], k[c], v[c], cmt, out[c], kept
            _backward(*tensors, alignment, *of_scores, into, ctx.landmark_values, ctx.joint_softmax)
        return *gradients[:-1], *[None] * 9, d_gates, None, None, None


def _part(x: Tensor | None, chunk: tuple[slice, slice]) -> Tensor | None:
    return None if x is None else x[chunk]


def _context_miss(values: Tensor | None, controlled: Tensor | None, chunk: tuple[slice, slice]) -> _ContextMiss | None:
    if values is None or controlled is None:
        return None
    return _ContextMiss(values[chunk], controlled[chunk[0]])


def landmark_attention_blockwise(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention.

    With a context miss token the log-sum-exp has no gradient. Inputs in half precision are computed in float32.
    """
    dtype = inputs.q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    q, k, v, cmt_scores = (x if x is None else x.to(compute) for x in (inputs.q, inputs.k, inputs.v, inputs.cmt_scores))
    gates = inputs.gates if inputs.gates is None else inputs.gates.to(compute)
    if inputs.hierarchy is not None:
        assert q is not None
        assert k is not None
        scores, own = landmark_scores(q, k, inputs.block_size, inputs.phase, inputs.prefix, inputs.scale)
        gates = adjust(scores, own, inputs.hierarchy)[0]
    settings = inputs.controlled, inputs.block_size, inputs.phase, inputs.prefix, inputs.scale, inputs.top_k
    sight = inputs.local_blocks, inputs.bidirectional, inputs.softcap
    of_gates = gates, inputs.empty, inputs.landmark_values, inputs.joint_softmax
    out, lse = _Blockwise.apply(q, k, v, cmt_scores, *settings, *sight, *of_gates)
    return out.to(dtype), lse
