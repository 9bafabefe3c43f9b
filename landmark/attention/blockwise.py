"""Landmark attention from plain attention over single blocks: exact, O(T·d + T·T/W) memory beside the outputs saved.

With o_ib, L_ib plain attention of query i over the normal tokens of block b alone and its log-sum-exp,

    out_i = Σ_b P_ib·o_ib + P_i,local·o_i,local,      P_i = softmax([s_i,landmark(b) …, L_i,local])

and the gradient of block b is a flash backward called with out = o_ib and log-sum-exp = L_ib − log P_ib (local:
out_i and L_i,local − log P_i,local). Derivation: README.md beside this file.

The window is laid out in two parts. The *first* block is short by `phase` tokens, differently per sample; it stays
where it is and is masked. All later blocks are whole, but for the end of the window: the *grid* holds them, every
sample shifted so that blocks line up. Positions of the grid beyond the window repeat its last token; no query of the
window can see them, and what is computed for them is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from landmark.attention.flash import attention_backward, attention_forward


class _Grid:
    """Which rows of q, k, v make up the first block and the grid, and where each output row is found again."""

    def __init__(self, phase: Tensor, block_size: int, queries: int, prefix: int):
        width, keys = block_size + 1, prefix + queries
        self.phase, self.block_size, self.prefix = phase, block_size, prefix
        head = (width - phase)[:, None]  # positions of the first block, its landmark included
        self.blocks = max(0, -(-(keys - int(head.min())) // width))
        self.first_query_block = max(0, (prefix - int(head.max())) // width)
        self.needs_first = prefix < int(head.max())

        def steps(count: int) -> Tensor:
            return torch.arange(count, device=phase.device)[None, :]

        position = steps(width).expand(len(phase), -1)
        self.first_keys = position.clamp(max=keys - 1)
        self.first_queries = (position - prefix).clamp(0, queries - 1)
        self.first_valid = (position >= prefix) & (position < head) & (position < keys)
        position = head + steps(self.blocks * width)
        self.grid_keys = position.clamp(max=keys - 1)
        position = position[:, self.first_query_block * width :]
        self.grid_queries = (position - prefix).clamp(0, queries - 1)
        self.outside = ((position < prefix) | (position >= keys)).flatten().nonzero().squeeze(1)
        position = steps(keys)
        self.key_rows = torch.where(position < head, position, position - head + width)
        self.query_width = width if self.needs_first else 0  # rows that the first block takes of the queries' parts
        query = position[:, prefix:]
        in_grid = query - head + self.query_width - self.first_query_block * width
        self.query_rows = torch.where(query < head, query, in_grid)
        # Rows of the first block see its normal tokens; so does, from the grid, every query.
        token, row = steps(block_size), steps(width)
        in_first = token < block_size - phase[:, None]
        seen = in_first[:, None, :] & (token <= row.mT) & (row.mT < head[:, :, None])
        self.visible_in_first, self.visible_from_grid = seen[:, None], in_first[:, None, None, :]

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of each sample: x (B, H, T, d), rows (B, n) → (B, H, n, d), stored as (B, n, H, d)."""
    batch, heads, length, dim = x.shape
    flat = x.transpose(1, 2).reshape(batch * length, heads * dim)
    index = rows + torch.arange(batch, device=x.device)[:, None] * length
    return flat.index_select(0, index.flatten()).view(batch, -1, heads, dim).transpose(1, 2)


class _Parts:
    """Results for the first block and for the grid, (B, H, rows, d) each, in one buffer that `gather` reads once."""

    def __init__(self, like: Tensor, first_rows: int, grid_rows: int, zero: bool = False):
        batch, heads, _, dim = like.shape
        self.rows = first_rows, grid_rows
        make = like.new_zeros if zero else like.new_empty
        self.flat = make(batch * (first_rows + grid_rows), heads * dim)
        first, grid = self.flat.split([batch * first_rows, batch * grid_rows])
        self.first = first.view(batch, first_rows, heads, dim).transpose(1, 2)
        self.grid = grid.view(batch, grid_rows, heads, dim).transpose(1, 2)

    def gather(self, rows: Tensor) -> Tensor:
        """rows: (B, n), counted through both parts of a sample → (B, H, n, d)."""
        (first, grid), batch = self.rows, len(rows)
        sample = torch.arange(batch, device=rows.device)[:, None]
        in_grid = batch * first + sample * grid + rows - first
        index = torch.where(rows < first, sample * first + rows, in_grid)
        heads, dim = self.grid.shape[1], self.grid.shape[3]
        return self.flat.index_select(0, index.flatten()).view(batch, -1, heads, dim).transpose(1, 2)


def _blocks(x: Tensor, width: int) -> Tensor:
    """(B, H, n·W, …) → (B, H, n, W, …)."""
    return x.unflatten(2, (-1, width))


def _folded_blocks(x: Tensor, batch: int) -> Tensor:
    """(B·n, H, W, …) → (B, H, n, W, …)."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _fold(x: Tensor, width: int) -> Tensor:
    """(B, H, n·W, …) stored as (B, n·W, H, …) → (B·n, H, W, …): every block a sample of its own."""
    return x.transpose(1, 2).reshape(-1, width, x.shape[1], *x.shape[3:]).transpose(1, 2)


def _unfold(x: Tensor, batch: int) -> Tensor:
    """The inverse of `_fold`."""
    return x.transpose(1, 2).reshape(batch, -1, x.shape[1], *x.shape[3:]).transpose(1, 2)


def _fold_keys(x: Tensor, grid: _Grid) -> Tensor:
    """Normal tokens of the grid's blocks that hold queries: (B·n, H, ℓ, d)."""
    width = grid.block_size + 1
    return _fold(x[:, :, grid.first_query_block * width :], width)[:, :, : grid.block_size]


def _set_local(x_grid: Tensor, folded: Tensor, grid: _Grid) -> None:
    """Write what belongs to the keys of `_fold_keys` back into the grid."""
    width = grid.block_size + 1
    blocks = _blocks(x_grid[:, :, grid.first_query_block * width :], width)
    blocks[:, :, :, : grid.block_size] = _folded_blocks(folded, len(x_grid))


def _block(x: Tensor, grid: _Grid, index: int) -> Tensor:
    start = index * (grid.block_size + 1)
    return x[:, :, start : start + grid.block_size]


def _earlier_blocks(grid: _Grid):
    """For each block that stands before some block of the grid: its column among the gates, its number in the grid
    (None: the first block) and the first row of the grid's queries that sees it."""
    width = grid.block_size + 1
    for column in range(grid.blocks):
        yield column, column - 1 if column else None, max(0, column - grid.first_query_block) * width


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, block_size: int, phase: Tensor, prefix: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        grid = _Grid(phase, block_size, q.shape[2], prefix)
        batch, width = q.shape[0], block_size + 1
        lses, saved = [], []
        parts = _Parts(q, grid.query_width, (grid.blocks - grid.first_query_block) * width)
        k_first, v_first = _take(k, grid.first_keys), _take(v, grid.first_keys)
        if grid.needs_first:
            q_first = _take(q, grid.first_queries)
            out_first, lse_first = attention_forward(
                q_first,
                k_first[:, :, :block_size],
                v_first[:, :, :block_size],
                scale=scale,
                mask=grid.mask(grid.visible_in_first, q.dtype),
            )
            saved = [q_first, out_first, lse_first]
            parts.first.copy_(out_first)
            lses.append(lse_first.masked_fill(~grid.visible_in_first.any(-1), -torch.inf))
        if grid.blocks:
            q_grid, k_grid, v_grid = (
                _take(q, grid.grid_queries),
                _take(k, grid.grid_keys),
                _take(v, grid.grid_keys),
            )
            out_local, lse_local = attention_forward(
                _fold(q_grid, width),
                _fold_keys(k_grid, grid),
                _fold_keys(v_grid, grid),
                scale=scale,
                causal=True,
            )
            lse_local = _unfold(lse_local, batch)
            landmarks = _landmark_keys(k_first, k_grid, grid)
            gates = _gates(q_grid, landmarks, grid, scale)
            lse = torch.logaddexp(lse_local, gates.logsumexp(-1))
            out, local_weights = parts.grid, (lse_local - lse).exp().to(q.dtype)[..., None]
            torch.mul(_folded_blocks(out_local, batch), _blocks(local_weights, width), out=_blocks(out, width))
            weights = (gates - lse[..., None]).exp().to(q.dtype)
            block_outs = []
            for column, block, start in _earlier_blocks(grid):
                keys, values, mask = _keys_of(block, k_first, v_first, k_grid, v_grid, grid)
                block_out, block_lse = attention_forward(q_grid[:, :, start:], keys, values, scale=scale, mask=mask)
                out[:, :, start:].addcmul_(weights[:, :, start:, column, None], block_out)
                block_outs += [block_out, block_lse]
            saved += [q_grid, k_grid, v_grid, landmarks, gates, lse, out, *block_outs]
            lses.append(lse)
        ctx.save_for_backward(k_first, v_first, *saved)
        ctx.grid, ctx.scale = grid, scale
        result = parts.gather(grid.query_rows)
        result_lse = _take(torch.cat(lses, 2)[..., None], grid.query_rows).squeeze(-1)
        ctx.mark_non_differentiable(result_lse)
        return result, result_lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, _grad_lse: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grid: _Grid = ctx.grid
        scale: float = ctx.scale
        k_first, v_first, *saved = ctx.saved_tensors
        block_size, width = grid.block_size, grid.block_size + 1
        batch = k_first.shape[0]
        dks = _Parts(k_first, width, grid.blocks * width, zero=True)
        dvs = _Parts(v_first, width, grid.blocks * width, zero=True)
        dqs = _Parts(k_first, grid.query_width, (grid.blocks - grid.first_query_block) * width)
        if grid.needs_first:
            q_first, out_first, lse_first, *saved = saved
            dq, dk, dv = attention_backward(
                _take(grad_out, grid.first_queries) * grid.first_valid[:, None, :, None],
                q_first,
                k_first[:, :, :block_size],
                v_first[:, :, :block_size],
                out_first,
                lse_first,
                scale=scale,
                mask=grid.mask(grid.visible_in_first, q_first.dtype),
            )
            dqs.first.copy_(dq)
            dks.first[:, :, :block_size] = dk
            dvs.first[:, :, :block_size] = dv
        if grid.blocks:
            q_grid, k_grid, v_grid, landmarks, gates, lse, out, *block_outs = saved
            do = _take(grad_out, grid.grid_queries)
            do.transpose(1, 2).flatten(0, 1).index_fill_(0, grid.outside, 0.0)
            dq, dk, dv = attention_backward(
                _fold(do, width),
                _fold(q_grid, width),
                _fold_keys(k_grid, grid),
                _fold_keys(v_grid, grid),
                _fold(out, width),
                _fold(lse, width),
                scale=scale,
                causal=True,
            )
            _blocks(dqs.grid, width).copy_(_folded_blocks(dq, batch))
            _set_local(dks.grid, dk, grid)
            _set_local(dvs.grid, dv, grid)
            d_out = (do * out).sum(-1)
            weights = (gates - lse[..., None]).exp().to(q_grid.dtype)
            d_gates = torch.zeros_like(weights)
            for column, block, start in _earlier_blocks(grid):
                keys, values, mask = _keys_of(block, k_first, v_first, k_grid, v_grid, grid)
                block_out, block_lse = block_outs[2 * column : 2 * column + 2]
                rows = do[:, :, start:]
                dq_block, dk, dv = attention_backward(
                    rows,
                    q_grid[:, :, start:],
                    keys,
                    values,
                    block_out,
                    block_lse + lse[:, :, start:] - gates[:, :, start:, column],
                    scale=scale,
                    mask=mask,
                )
                dqs.grid[:, :, start:] += dq_block
                to_dk, to_dv = (dks.first, dvs.first) if block is None else (dks.grid, dvs.grid)
                _block(to_dk, grid, block or 0).add_(dk)
                _block(to_dv, grid, block or 0).add_(dv)
                difference = (rows * block_out).sum(-1) - d_out[:, :, start:]
                d_gates[:, :, start:, column] = weights[:, :, start:, column] * difference * scale
            dqs.grid.add_(d_gates @ landmarks)
            _add_landmark_gradients(dks.first, dks.grid, d_gates.mT @ q_grid, grid)
        gradients = dqs.gather(grid.query_rows), dks.gather(grid.key_rows), dvs.gather(grid.key_rows)
        return *gradients, None, None, None, None


def _keys_of(block: int | None, k_first: Tensor, v_first: Tensor, k_grid: Tensor, v_grid: Tensor, grid: _Grid):
    if block is None:
        mask = grid.mask(grid.visible_from_grid, k_first.dtype)
        return _block(k_first, grid, 0), _block(v_first, grid, 0), mask
    return _block(k_grid, grid, block), _block(v_grid, grid, block), None


def _landmark_keys(k_first: Tensor, k_grid: Tensor, grid: _Grid) -> Tensor:
    """Keys of the landmarks that the grid can see, (B, H, blocks, d): the first block's first."""
    first = _take(k_first, (grid.block_size - grid.phase)[:, None])
    width = grid.block_size + 1
    return torch.cat([first, k_grid[:, :, grid.block_size : (grid.blocks - 1) * width : width]], 2)


def _add_landmark_gradients(dk_first: Tensor, dk_grid: Tensor, d_landmarks: Tensor, grid: _Grid) -> None:
    samples = torch.arange(len(grid.phase), device=dk_first.device)
    dk_first[samples, :, grid.block_size - grid.phase] += d_landmarks[:, :, 0]
    width = grid.block_size + 1
    dk_grid[:, :, grid.block_size : (grid.blocks - 1) * width : width] += d_landmarks[:, :, 1:]


def _gates(q_grid: Tensor, landmarks: Tensor, grid: _Grid, scale: float) -> Tensor:
    """Scores of the landmarks (B, H, rows, blocks), −∞ where a block is not before the query's, or is empty."""
    rows = torch.arange(q_grid.shape[2], device=q_grid.device) // (grid.block_size + 1) + grid.first_query_block
    hidden = torch.arange(grid.blocks, device=q_grid.device) > rows[:, None]
    empty = (grid.phase == grid.block_size)[:, None, None, None]
    gates = (q_grid @ landmarks.mT) * scale
    gates = gates.to(torch.promote_types(gates.dtype, torch.float32)).masked_fill(hidden, -torch.inf)
    gates[..., :1] = gates[..., :1].masked_fill(empty, -torch.inf)
    return gates


def landmark_attention_blockwise(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, phase: Tensor, prefix: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and outer log-sum-exp (B, H, T) of landmark attention; the latter carries no gradient.

    q: (B, H, T, d); k, v: (B, H, prefix + T, d); phase: (B,).
    """
    return _Blockwise.apply(q, k, v, block_size, phase, prefix, scale)
