"""Landmark attention in tiles of whole blocks: exact, O(T·d + T·T/W) memory, no T×T tensor.

A tile holds the scores of a few blocks of queries against all blocks that they see, as (N, block, offset, query):

1. inner: log-sum-exp over the offsets of each block, without landmarks; causal in the query's own block.
2. gates: the landmark's score for an earlier block; the inner log-sum-exp for the query's own block.
   A part α of the inner log-sum-exp may be added.
3. outer: softmax of the gates over blocks, and over a place without a value if there is one (scoring.py).
4. weights: exp(score − inner) · outer.

The backward pass computes the weights again, from two numbers kept for each query and block. README.md has the
derivation. Scores and log-sum-exps are in units of log 2, because exp2 is the fastest exponential. The windows of a
batch are padded so that the blocks of all line up (blockwise_tiles.py). N: sequences, the heads of some samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from landmark.attention.blockwise_tiles import BlockAlignment, Tile, Workspace, align_blocks, product, workspace
from landmark.attention.layout import AttentionInputs
from landmark.attention.scoring import share_cmt_weight, shared_weight_gradient
from landmark.utils.constants import LOG2_E

TILE_ROWS = 102  # queries of a tile, in whole blocks
TILE_SIZE = 1 << 20  # scores of the sequences computed together; they fit into the processor's cache


class Sequences(NamedTuple):
    """Some samples and heads of the batch, which are computed together, and the alignment of their windows."""

    rows: slice
    heads: slice
    alignment: BlockAlignment

    def tiles(self) -> list[Tile]:
        """All tiles, those of the latest queries first."""
        alignment = self.alignment
        count = max(1, TILE_ROWS // alignment.width)
        return [
            Tile(alignment, max(alignment.first, stop - count), stop)
            for stop in range(alignment.blocks, alignment.first, -count)
        ]


def _parts(inputs: AttentionInputs) -> list[Sequences]:
    """The parts of the batch, computed one by one."""
    (samples, heads, queries, _), width = inputs.q.shape, inputs.block_size + 1
    phases = tuple(inputs.phase.tolist())
    scores = max(TILE_ROWS, width) * (inputs.prefix + queries)  # of one sequence's largest tile
    sequences = max(1, TILE_SIZE // scores)
    rows, columns = max(1, sequences // heads), min(sequences, heads)
    parts = []
    for sample in range(0, samples, rows):
        for head in range(0, heads, columns):
            samples_here = slice(sample, min(sample + rows, samples))
            heads_here = slice(head, min(head + columns, heads))
            count, window = heads_here.stop - heads_here.start, (inputs.prefix, queries)
            alignment = align_blocks(width, phases[samples_here], *window, count, inputs.q.device)
            parts.append(Sequences(samples_here, heads_here, alignment))
    return parts


class Padded(NamedTuple):
    """A part's tensors, padded to whole blocks, each (N, rows, …).

    extra: (N, rows, 1), of the place without a value its scores, or in the backward pass its weights; None: there is
    no such place. controlled: (n, blocks), bool, landmarks that share its weight.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    extra: Tensor | None
    controlled: Tensor | None

    @staticmethod
    def of(part: Sequences, inputs: AttentionInputs, extra: Tensor | None, work: Workspace) -> "Padded":
        """Those of a part. extra: (B, H, T), as above."""
        q, k, v = (x[part.rows, part.heads] for x in (inputs.q, inputs.k, inputs.v))
        alignment, (sequences, dim) = part.alignment, (len(q) * q.shape[1], q.shape[3])
        keys = alignment.blocks * alignment.width
        queries = keys - alignment.first * alignment.width
        if extra is not None:
            extra = alignment.pad(extra[part.rows, part.heads, :, None], work("extra", sequences, queries, 1))
        return Padded(
            alignment.pad(q, work("q", sequences, queries, dim)),
            alignment.pad(k, work("k", sequences, keys, dim)),
            alignment.pad(v, work("v", sequences, keys, dim)),
            extra,
            None if inputs.controlled is None else inputs.controlled[part.rows],
        )


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Replace x by 2^(x − largest), in place. Returns the sum over `dim`, made positive, and log2 Σ 2^x."""
    limits = torch.finfo(x.dtype)
    largest = x.amax(dim, keepdim=True).clamp_(min=limits.min)
    total = x.sub_(largest).exp2_().sum(dim)
    logsumexp = largest.squeeze(dim) + total.log2()
    return total.clamp_(min=limits.tiny), logsumexp


def _forward(part: Sequences, inputs: AttentionInputs, work: Workspace, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Write a part's out and lse.

    Returns two tensors (N, block, query) for each tile: the outer weights, and the shift in weights =
    exp2(score − shift), ∞ where tokens have no weight.
    """
    alignment, padded = part.alignment, Padded.of(part, inputs, inputs.extra, work)
    saved, padded_lse = [], work("lse", *padded.q.shape[:2])
    extra = None if padded.extra is None else padded.extra.mul_(LOG2_E)
    for tile in part.tiles():
        scores = tile.scores(padded.q, padded.k, inputs.scale, inputs.softcap, work)
        gates = tile.gates(scores)
        weights = tile.mask(scores)
        total, inner = _exponentials(weights, 2)
        gates.masked_fill_(inner == -torch.inf, -torch.inf)  # a first block without tokens
        if inputs.alpha:
            gates.add_(inner, alpha=inputs.alpha)
        gate_of_extra = []
        if extra is not None and padded.controlled is not None:
            gate_of_extra = [share_cmt_weight(gates, tile.row_of(extra), tile.controlled(padded.controlled))]
        tile.own(gates).copy_(tile.own(inner))
        shift = inner - gates
        gates = torch.cat([gates, *gate_of_extra], 1) if gate_of_extra else gates
        outer_total, outer_lse = _exponentials(gates, 1)
        outer = gates.div_(outer_total[:, None])[:, : tile.stop]
        shift = torch.where(outer > 0, shift + outer_lse[:, None], torch.inf)
        saved += [outer, shift]
        weights.mul_((outer / total)[:, :, None])
        rows = product(weights.flatten(1, 2).mT, tile.keys(padded.v), work("rows", *tile.queries(padded.q).shape))
        alignment.unpad(rows, out, tile.row)
        torch.div(outer_lse, LOG2_E, out=tile.queries(padded_lse))
    alignment.unpad(padded_lse, lse)
    return saved


def _backward(
    part: Sequences,
    inputs: AttentionInputs,
    kept: tuple[Tensor, Tensor | None, list[Tensor]],
    gradients: tuple[Tensor, Tensor | None],
    work: Workspace,
    into: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    """Write a part's gradients of q, k, v and extra.

    kept: out (B, H, T, d), the weight (B, H, T) of the place without a value, and what `_forward` returned. gradients:
    of out and, if there is one, of the log-sum-exp.
    """
    (out, extra_weight, kept_tiles), (do, d_lse) = kept, gradients
    here, alignment, (grad_q, grad_k, grad_v, grad_extra) = (part.rows, part.heads), part.alignment, into
    row_mean = (do[here] * out[here]).sum(-1, keepdim=True)  # D_i
    if d_lse is not None:
        row_mean -= d_lse[here][..., None]  # the log-sum-exp has the weight as derivative, from which D_i is subtracted
    padded = Padded.of(part, inputs, extra_weight, work)
    padded_do = alignment.pad(do[here], work("do", *padded.q.shape))
    row_mean = alignment.pad(row_mean, work("row_mean", *padded.q.shape[:2], 1))
    dk, dv = work("dk", *padded.k.shape).zero_(), work("dv", *padded.v.shape).zero_()
    d_extra = work("d_extra", *padded.q.shape[:2], 1)
    on_cpu, largest = out.device.type == "cpu", 1 / torch.finfo(out.dtype).eps
    for tile, outer, shift in zip(part.tiles(), kept_tiles[::2], kept_tiles[1::2], strict=True):
        keys, queries, tile_do = tile.keys(padded.k), tile.queries(padded.q), tile.queries(padded_do)
        scores, flattening = tile.scores(padded.q, padded.k, inputs.scale, inputs.softcap, work), None
        if inputs.softcap is not None:
            flattening = work("slope", *scores.shape).copy_(scores).div_(inputs.softcap * LOG2_E)
            flattening.square_().neg_().add_(1)  # the derivative of a score with a cap, 1 − (capped / cap)²
        weights = tile.mask(scores).sub_(shift[:, :, None])
        # A weight is at most 1, also where scores are so large that the difference is inexact; a GPU would wait.
        if not on_cpu or float(shift.masked_fill(shift == torch.inf, 0.0).abs().amax()) > largest:
            weights.clamp_(max=0)
        weights.exp2_()
        tile.keys(dv).add_(product(weights.flatten(1, 2), tile_do, work("keys", *keys.shape)))
        d_scores = work("d_scores", len(queries), keys.shape[1], queries.shape[1])
        d_scores = tile.blocked(product(tile.keys(padded.v), tile_do.mT, d_scores)).mul_(weights)
        total = d_scores.sum(2)  # P_ib·D_ib
        own_mean = gate_mean = tile.row_of(row_mean)
        if padded.extra is not None and padded.controlled is not None:
            controlled = tile.controlled(padded.controlled)
            gate_mean, d_tile = shared_weight_gradient(total, own_mean, tile.row_of(padded.extra), controlled)
            tile.row_of(d_extra).copy_(d_tile)
        d_scores.addcmul_(weights, _mean_of_blocks(tile, total, outer, own_mean, gate_mean, inputs.alpha), value=-1)
        d_gates = torch.addcmul(total, outer, gate_mean, value=-1)
        tile.own(d_gates).zero_()
        d_scores[:, :, -1] = d_gates
        if flattening is not None:
            d_scores.mul_(flattening)
        d_scores = d_scores.flatten(1, 2)
        dq = product(d_scores.mT, keys, work("rows", *queries.shape), inputs.scale)
        alignment.unpad(dq, grad_q[here], tile.row)
        tile.keys(dk).add_(product(d_scores, queries, work("keys", *keys.shape), inputs.scale))
    alignment.unpad(dk, grad_k[here])
    alignment.unpad(dv, grad_v[here])
    if grad_extra is not None:
        alignment.unpad(d_extra, grad_extra[here][..., None])


def _mean_of_blocks(
    tile: Tile, total: Tensor, outer: Tensor, own_mean: Tensor, gate_mean: Tensor, alpha: float
) -> Tensor:
    """What the gradient of a token's score subtracts: (N, block, 1, query).

    D_ib, the mean of its block; in the query's own block D_i, and of the part α of a gate what its gradient subtracts.
    total, outer: (N, block, query), P_ib·D_ib and P_ib. own_mean: (N, 1, query), D_i. gate_mean: (N, block or 1,
    query).
    """
    mean = gate_mean.expand_as(total)
    if alpha != 1:
        mean = total / outer.clamp(min=torch.finfo(outer.dtype).tiny)  # D_ib
        if alpha:
            mean.lerp_(gate_mean.expand_as(mean), alpha)
        tile.own(mean).copy_(tile.own(own_mean.expand_as(mean)))
    return mean[:, :, None]


def _rows_first(x: Tensor) -> Tensor:
    """A new tensor like x, (B, H, T, d), with the memory layout (B, T, H, d) of the projections around attention."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


class _Blockwise(torch.autograd.Function):
    """q, k, v and extra have gradients, and the others come in `settings`."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, settings: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        inputs, work = settings._replace(q=q, k=k, v=v, extra=extra), workspace(q)
        out, lse, kept_tiles = _rows_first(q), q.new_empty(q.shape[:3]), []
        for part in _parts(inputs):
            kept_tiles += _forward(part, inputs, work, out[part.rows, part.heads], lse[part.rows, part.heads])
        extra_weight = None if extra is None else (extra - lse).clamp(max=0).exp()
        ctx.save_for_backward(q, k, v, extra, out, extra_weight, *kept_tiles)
        ctx.settings = settings._replace(q=None, k=None, v=None, extra=None)  # the tensors are saved
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, extra, out, extra_weight, *kept_tiles = ctx.saved_tensors
        inputs, work = ctx.settings._replace(q=q, k=k, v=v, extra=extra), workspace(q)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_extra = None if extra is None else torch.empty_like(extra)
        into = _rows_first(q), _rows_first(k), _rows_first(v), grad_extra
        for part in _parts(inputs):
            count = 2 * len(part.tiles())
            kept = out, extra_weight, kept_tiles[:count]
            _backward(part, inputs, kept, (grad_out, grad_lse), work, into)
            kept_tiles = kept_tiles[count:]
        return *into, None


@torch.compiler.disable  # its loops depend on the phases of the windows, which a graph does not hold
def landmark_attention_blockwise(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T); half precision is computed in float32."""
    dtype = inputs.q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    out, lse = _Blockwise.apply(*(x if x is None else x.to(compute) for x in inputs[:4]), inputs)
    return out.to(dtype), lse
