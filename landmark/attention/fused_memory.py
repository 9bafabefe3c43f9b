"""Attention to retrieved blocks as one Triton kernel: blocks are read where they lie, each query's own or a chunk's.

A block's tokens share what its landmark's score gets in a softmax over the landmarks of the retrieved blocks and, but
for a context miss token, all that the query sees of its own chunk, of which output and log-sum-exp are given (paper,
Section 3.2). Queries come turned for each lag, and keys by their offsets, so that none is turned here.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused_tuning import on_device_of, padded

QUERIES = 64  # of a tile, where they share their blocks


def attend_to_blocks(
    turned: Tensor,
    keys: Tensor,
    values: Tensor,
    landmarks: Tensor,
    rows: Tensor,
    places: Tensor,
    lags: Tensor,
    *,
    local: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    reading: Tensor | None = None,
) -> Tensor:
    """Output (B, H, T, d) of queries over the q blocks that each retrieved, together with what they see locally.

    turned: (S, B, T, H, d), scaled and turned for lag 1…S. keys, values: (m, ℓ, d). landmarks: (n, d). rows, places,
    lags: (B, H, T or 1, q), integer: of each block its row in keys, its landmark's in landmarks, and how far back it
    stands; T = 1 where all queries share their blocks. local: output (B, H, T, d) and log-sum-exp (B, H, T) of what the
    query sees besides (None: nothing). weight: (B, H, T), by which the output is multiplied (None: 1). reading:
    (B, H, T), bool, the queries that read at all; the output of others is 0 (None: all do).
    """
    from landmark.attention.fused_memory_kernel import retrieved_blocks

    _, batch, queries, heads, dim = turned.shape
    shared = rows.shape[2] == 1 and queries > 1
    rows, places, lags = (x.expand(batch, heads, -1, -1).contiguous() for x in (rows, places, lags))
    out = turned.new_empty(batch, heads, queries, dim)
    local_out, local_lse = (out, out) if local is None else (x.contiguous() for x in local)
    weight = None if weight is None else weight.float().contiguous()
    reading = None if reading is None else reading.to(torch.int8).contiguous()
    options = constants(keys.shape[1], dim, turned.dtype, shared=shared)
    with on_device_of(turned):
        retrieved_blocks[(-(-queries // options["M"]), heads, batch)](
            *(turned, keys, values, landmarks, rows, places, lags, local_out, local_lse),
            *(out if weight is None else weight, out if reading is None else reading, out),
            *(*turned.stride(), *keys.stride(), *values.stride(), *landmarks.stride()),
            *(queries, heads, rows.shape[3]),
            LOCAL=local is not None,
            WEIGHTED=weight is not None,
            SOME=reading is not None,
            **options,
        )
    return out


def constants(block_size: int, dim: int, dtype: torch.dtype, *, shared: bool) -> dict[str, Any]:
    """What the kernel is compiled for. shared: queries of a tile share their blocks."""
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
