"""Attention to retrieved blocks by one Triton kernel, which reads the blocks where they are stored.

The score of a block's landmark, its gate, takes part in a softmax with the gates of the other retrieved blocks and,
without a context miss token, with the log-sum-exp of local attention. The block's tokens share the weight that its gate
gets (paper, Section 3.2). Queries come rotated for each lag, and keys by their offsets: the kernel rotates nothing.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded

QUERIES = 64  # of a tile, where they share their blocks


def attend_to_retrieved_blocks(
    rotated_queries: Tensor,
    keys: Tensor,
    values: Tensor,
    landmarks: Tensor,
    rows: Tensor,
    places: Tensor,
    lags: Tensor,
    *,
    local: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Output of queries over the q blocks that each retrieved, merged with local attention.

    Args:
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        keys, values: (m, ℓ, d), blocks.
        landmarks: (n, d), keys of landmarks.
        rows: (B, H, T or 1, q), integer, the row of each retrieved block in keys and values; T = 1 where all queries
            share their blocks.
        places: as rows, the row of its landmark in landmarks.
        lags: as rows, how many blocks before the chunk it stands.
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention; None: only the blocks are attended to.
        weight: (B, H, T), factor of the output; None: 1.
        selected: (B, H, T), bool, queries that retrieve, the others get 0; None: all do.

    Returns (B, H, T, d).
    """
    from landmark.attention.fused.retrieved_blocks_kernel import retrieved_blocks

    _, batch, queries, heads, dim = rotated_queries.shape
    shared = rows.shape[2] == 1 and queries > 1
    rows, places, lags = (x.expand(batch, heads, -1, -1).contiguous() for x in (rows, places, lags))
    out = rotated_queries.new_empty(batch, heads, queries, dim)
    local_out, local_lse = (out, out) if local is None else (x.contiguous() for x in local)
    weight = None if weight is None else weight.float().contiguous()
    selected = None if selected is None else selected.to(torch.int8).contiguous()
    options = constants(keys.shape[1], dim, rotated_queries.dtype, shared=shared)
    with on_device_of(rotated_queries):
        retrieved_blocks[(-(-queries // options["M"]), heads, batch)](
            *(rotated_queries, keys, values, landmarks, rows, places, lags, local_out, local_lse),
            *(out if weight is None else weight, out if selected is None else selected, out),
            *(*rotated_queries.stride(), *keys.stride(), *values.stride(), *landmarks.stride()),
            *(queries, heads, rows.shape[3]),
            LOCAL=local is not None,
            WEIGHTED=weight is not None,
            MASKED=selected is not None,
            **options,
        )
    return out


def constants(block_size: int, dim: int, dtype: torch.dtype, *, shared: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel.

    Args:
        block_size: ℓ, tokens of a block.
        dim: of a head.
        dtype: of queries, keys and values.
        shared: whether the queries of a tile share their blocks.
    """
    load = padded(block_size) * padded(dim) * dtype.itemsize // (64 * 128 * 2)  # 1 at 64 halves of dimension 128
    return {
        "L": block_size,
        "D": dim,
        "BLOCK_D": padded(dim),
        "SEGMENT": padded(block_size),
        "M": (max(16, QUERIES // max(1, load)) if dtype.itemsize == 2 else 16) if shared else 1,
        "SHARED": shared,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 8 if load > 1 or (shared and dim > 64) else 4,
        "num_stages": 2 if load <= 1 else 1,
    }
