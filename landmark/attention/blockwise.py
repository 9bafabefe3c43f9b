"""Landmark attention in tiles of whole blocks: exact, O(T·d + T·T/W) memory, no T×T tensor.

A tile holds the scores of a few blocks of queries against every block so far, seen as (N, block, offset, query). Then

    inner    log-sum-exp over the offsets of each block: landmarks left out, the query's own block causal
    gates    the landmark's score for each earlier block, the inner log-sum-exp for the query's own
    outer    softmax of the gates over blocks, and over the context miss token if there is one (context_miss.py)
    weights  exp(score − inner) · outer

and no running maximum is needed. The backward pass makes the weights again from what a query keeps of each block; the
mean that the inner softmax's gradient subtracts is a sum over offsets that are all at hand. Derivation: README.md
beside this file. Scores and log-sum-exps are in units of log 2, for exp2 is the fastest exponential.

The samples of a batch are cut at different phases. Each is copied into a *frame* that begins where its first block
would: `phase` rows of padding, the window, padding up to a whole block. N: sequences, the heads of a few samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from landmark.attention.context_miss import defer, deferred_gradient
from landmark.attention.frames import Frame, Workspace, make_frame, workspace

TILE_ROWS = 102  # queries of a tile, in whole blocks
TILE_SIZE = 1 << 20  # scores of a tile, of as many sequences as that allows: what a cache holds
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class _Tile:
    """The queries of the blocks start … stop−1 against the keys of the blocks 0 … stop−1."""

    frame: Frame
    start: int
    stop: int

    @property
    def row(self) -> int:
        """First row of the tile in the frame of queries."""
        return (self.start - self.frame.first) * self.frame.width

    def queries(self, framed: Tensor) -> Tensor:
        return framed[:, self.row : self.row + (self.stop - self.start) * self.frame.width]

    def row_of(self, framed: Tensor) -> Tensor:
        """A number for each query (N, rows, 1) → (N, 1, query)."""
        return self.queries(framed).mT

    def controlled(self, blocks: Tensor) -> Tensor:
        """Controlled landmarks, (n, blocks) → (N, block, query): not that of the query's own block, whatever it is."""
        mask = blocks[:, : self.stop].repeat_interleave(self.frame.heads, 0)[..., None]
        mask = mask.repeat(1, 1, (self.stop - self.start) * self.frame.width)
        self.own(mask).fill_(False)
        return mask

    def keys(self, framed: Tensor) -> Tensor:
        return framed[:, : self.stop * self.frame.width]

    def blocked(self, x: Tensor) -> Tensor:
        """(N, keys, queries) → (N, block, offset, queries)."""
        return x.unflatten(1, (self.stop, self.frame.width))

    def own(self, x: Tensor) -> Tensor:
        """(N, block, …, queries) → (N, …, offset, query block), each query's own block."""
        return x.unflatten(-1, (-1, self.frame.width)).diagonal(-self.start, 1, x.ndim - 1)

    def scores(self, q: Tensor, k: Tensor, scale: float, work: Workspace) -> Tensor:
        """Scores (N, block, offset, query) of all keys, in the workspace."""
        keys, queries = self.keys(k), self.queries(q)
        scores = work("scores", len(q), keys.shape[1], queries.shape[1])
        return self.blocked(_product(keys, queries.mT, scores, scale * LOG2_E))

    def gates(self, scores: Tensor) -> Tensor:
        """Scores of the landmarks (N, block, query), −∞ from each query's own block on."""
        gates = scores[:, :, -1].clone()
        for block in range(self.start, self.stop):
            gates[:, block, : (block - self.start + 1) * self.frame.width] = -torch.inf
        return gates

    def mask(self, scores: Tensor) -> Tensor:
        """−∞, in place, for landmarks, padding and what a query's own block hides."""
        scores[:, :, -1] = -torch.inf
        if self.frame.hidden is not None:
            first = scores[:, 0, :-1].unflatten(0, (-1, self.frame.heads))
            first.masked_fill_(self.frame.hidden, -torch.inf)
        self.own(scores).masked_fill_(self.frame.future, -torch.inf)
        return scores


def _tiles(frame: Frame) -> list[_Tile]:
    """The latest queries first."""
    count = max(1, TILE_ROWS // frame.width)
    return [_Tile(frame, max(frame.first, stop - count), stop) for stop in range(frame.blocks, frame.first, -count)]


def _product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Put 2^(x − largest) in x's place. Returns their sum, or a tiny number for it, and log2 Σ 2^x, without `dim`."""
    limits = torch.finfo(x.dtype)
    largest = x.amax(dim, keepdim=True).clamp_(min=limits.min)
    total = x.sub_(largest).exp2_().sum(dim)
    logsumexp = largest.squeeze(dim) + total.log2()
    return total.clamp_(min=limits.tiny), logsumexp


@dataclass(frozen=True)
class _Miss:
    """The context miss token. values: (n, H, T), its scores in nats, or on the way back its weights.
    controlled: (n, blocks), bool."""

    values: Tensor
    controlled: Tensor

    def place(self, frame: Frame, work: Workspace) -> Tensor:
        """The values in a frame, (N, rows, 1)."""
        rows = (frame.blocks - frame.first) * frame.width
        return frame.place(self.values[..., None], work("miss", len(self.values) * frame.heads, rows, 1))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    miss: _Miss | None,
    frame: Frame,
    scale: float,
    work: Workspace,
    out: Tensor,
    lse: Tensor,
) -> list[Tensor]:
    """Write out and lse of the frame's samples. Returns, for each tile, the outer weights (N, block, query) and what
    to subtract from scores before exp2 makes weights of them."""
    q, k, v = _place_all(q, k, v, frame, work)
    saved, framed_lse = [], work("lse", *q.shape[:2])
    framed_miss = None if miss is None else miss.place(frame, work).mul_(LOG2_E)
    for tile in _tiles(frame):
        scores = tile.scores(q, k, scale, work)
        gates, weights = tile.gates(scores), tile.mask(scores)
        total, inner = _exponentials(weights, 2)
        gates.masked_fill_(inner == -torch.inf, -torch.inf)  # an empty first block
        nowhere = []
        if miss is not None and framed_miss is not None:
            nowhere = [defer(gates, tile.row_of(framed_miss), tile.controlled(miss.controlled))]
        tile.own(gates).copy_(tile.own(inner))
        shift = inner - gates
        gates = torch.cat([gates, *nowhere], 1) if nowhere else gates
        outer_total, outer_lse = _exponentials(gates, 1)
        outer = gates.div_(outer_total[:, None])[:, : tile.stop]
        shift = torch.where(outer > 0, shift + outer_lse[:, None], torch.inf)
        saved += [outer, shift]
        weights.mul_((outer / total)[:, :, None])
        rows = work("rows", *tile.queries(q).shape)
        frame.take(_product(weights.flatten(1, 2).mT, tile.keys(v), rows), out, tile.row)
        torch.div(outer_lse, LOG2_E, out=tile.queries(framed_lse))
    frame.take(framed_lse, lse)
    return saved


def _place_all(q: Tensor, k: Tensor, v: Tensor, frame: Frame, work: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    sequences, dim = len(q) * q.shape[1], q.shape[3]
    keys = frame.blocks * frame.width
    queries = keys - frame.first * frame.width
    return (
        frame.place(q, work("q", sequences, queries, dim)),
        frame.place(k, work("k", sequences, keys, dim)),
        frame.place(v, work("v", sequences, keys, dim)),
    )


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    miss: _Miss | None,
    out: Tensor,
    saved: list[Tensor],
    frame: Frame,
    scale: float,
    work: Workspace,
    gradients: list[Tensor],
) -> None:
    """Write the gradients of q, k, v, and of the scores of a context miss token, of the frame's samples."""
    to_dq, to_dk, to_dv, *to_d_miss = gradients
    row_mean = (do * out).sum(-1, keepdim=True)  # D_i
    q, k, v = _place_all(q, k, v, frame, work)
    do = frame.place(do, work("do", *q.shape))
    row_mean = frame.place(row_mean, work("row_mean", *q.shape[:2], 1))
    dk, dv, d_miss = work("dk", *k.shape), work("dv", *v.shape), work("d_miss", *q.shape[:2], 1)
    framed_miss = None if miss is None else miss.place(frame, work)
    for tile, outer, shift in zip(_tiles(frame), saved[::2], saved[1::2], strict=True):
        queries, keys, tile_do = tile.queries(q), tile.keys(k), tile.queries(do)
        weights = tile.mask(tile.scores(q, k, scale, work)).sub_(shift[:, :, None]).exp2_()
        _collect(tile, dv, _product(weights.flatten(1, 2), tile_do, work("keys", *keys.shape)))
        d_scores = work("d_scores", len(q), keys.shape[1], queries.shape[1])
        d_scores = tile.blocked(_product(tile.keys(v), tile_do.mT, d_scores)).mul_(weights)
        total = d_scores.sum(2)  # P_ib·D_ib
        own_mean = tile.queries(row_mean).mT  # (N, 1, query)
        mean = total / outer.clamp(min=torch.finfo(outer.dtype).tiny)  # D_ib
        tile.own(mean).copy_(tile.own(own_mean.expand_as(mean)))
        d_scores.addcmul_(weights, mean[:, :, None], value=-1)
        if miss is not None and framed_miss is not None:
            controlled = tile.controlled(miss.controlled)
            own_mean, d_tile = deferred_gradient(total, own_mean, tile.row_of(framed_miss), controlled)
            tile.row_of(d_miss).copy_(d_tile)
        d_gates = torch.addcmul(total, outer, own_mean, value=-1)
        tile.own(d_gates).zero_()
        d_scores[:, :, -1] = d_gates
        d_scores = d_scores.flatten(1, 2)
        frame.take(_product(d_scores.mT, keys, work("rows", *queries.shape), scale), to_dq, tile.row)
        _collect(tile, dk, _product(d_scores, queries, work("keys", *keys.shape), scale))
    frame.take(dk, to_dk)
    frame.take(dv, to_dv)
    for into in to_d_miss:
        frame.take(d_miss, into[..., None])


def _collect(tile: _Tile, total: Tensor, part: Tensor) -> None:
    """Add a tile's gradient of keys or values. The first tile reaches all of them."""
    into = tile.keys(total)
    if tile.stop == tile.frame.blocks:
        into.copy_(part)
    else:
        into.add_(part)


def _rows_first(x: Tensor) -> Tensor:
    """A new tensor like x, (B, H, T, d), stored as (B, T, H, d): as the projections around attention want it."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def _chunks(samples: int, heads: int, scores: int) -> list[tuple[slice, slice]]:
    """Samples and heads to work on at a time, where a tile has so many scores a sequence."""
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
        miss: Tensor | None,
        controlled: Tensor | None,
        block_size: int,
        phase: Tensor,
        prefix: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        (batch, heads, queries, _), width, phases = q.shape, block_size + 1, tuple(phase.tolist())
        chunks = _chunks(batch, heads, max(TILE_ROWS, width) * (prefix + queries))
        frames = [make_frame(width, phases[s], prefix, queries, h.stop - h.start, q.device) for s, h in chunks]
        out, lse, saved = _rows_first(q), q.new_empty(q.shape[:3]), []
        work = workspace(q)
        for chunk, frame in zip(chunks, frames, strict=True):
            of_chunk = _miss(miss, controlled, chunk)
            saved += _forward(q[chunk], k[chunk], v[chunk], of_chunk, frame, scale, work, out[chunk], lse[chunk])
        weight = None if miss is None else (miss - lse).exp()
        ctx.save_for_backward(q, k, v, out, weight, controlled, *saved)
        ctx.chunks, ctx.frames, ctx.scale = chunks, frames, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, _grad_lse: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, weight, controlled, *saved = ctx.saved_tensors
        gradients = [_rows_first(q), _rows_first(k), _rows_first(v)]
        gradients += [] if weight is None else [torch.empty_like(weight)]
        work = workspace(q)
        for c, frame in zip(ctx.chunks, ctx.frames, strict=True):
            kept, saved = saved[: 2 * len(_tiles(frame))], saved[2 * len(_tiles(frame)) :]
            into = [gradient[c] for gradient in gradients]
            miss = _miss(weight, controlled, c)
            _backward(grad_out[c], q[c], k[c], v[c], miss, out[c], kept, frame, ctx.scale, work, into)
        return *gradients, *[None] * (9 - len(gradients))


def _miss(values: Tensor | None, controlled: Tensor | None, chunk: tuple[slice, slice]) -> _Miss | None:
    if values is None or controlled is None:
        return None
    return _Miss(values[chunk], controlled[chunk[0]])


def landmark_attention_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    phase: Tensor,
    prefix: int,
    scale: float,
    miss: Tensor | None,
    controlled: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; the latter carries no gradient.

    q: (B, H, T, d); k, v: (B, H, prefix + T, d); phase: (B,), best on the CPU. miss: (B, H, T), scores of a context
    miss token; controlled: (B, blocks), given with it. Half precision is computed in float32.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    q_, k_, v_, miss = (x if x is None else x.to(compute) for x in (q, k, v, miss))
    out, lse = _Blockwise.apply(q_, k_, v_, miss, controlled, block_size, phase, prefix, scale)
    return out.to(q.dtype), lse
