"""Attention to retrieved blocks by one Triton kernel, which reads the blocks where they are stored.

The gate of a block is the score of its landmark. One softmax runs over the gates of the retrieved blocks and, without a
context miss token, the log-sum-exp of local attention. The tokens of a block share the weight of its gate (paper,
Section 3.2). The kernel rotates nothing: queries are already rotated for each lag, and keys by their offsets.

A program goes over the blocks of its queries one after the other. Where a few queries read many blocks, most of a GPU
would be idle: there several programs share them, and a second kernel merges what each has found.
"""

from __future__ import annotations

# Kernels get their compile-time constants by name, and plain numbers for them.
# pyright: reportCallIssue=false, reportArgumentType=false
import functools
from typing import Any

import torch
from torch import Tensor

from landmark.attention.fused.tuning import is_interpreted, of_whole_blocks, on_device_of, padded

QUERIES = 64  # of a tile, where queries share their blocks
LEAST = 4  # blocks of a program: the kernel that merges takes as long as about so many


def attend_to_retrieved_blocks(
    rotated_queries: Tensor,
    keys: Tensor,
    values: Tensor,
    landmarks: Tensor,
    ages: Tensor,
    *,
    added: int | Tensor,
    recent: int,
    rows: Tensor | None = None,
    local: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    selected: Tensor | None = None,
    alpha: float = 0.0,
    splits: int | None = None,
) -> Tensor:
    """Attention of queries to their retrieved blocks, merged with local attention.

    Args:
        rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
        keys, values: (m, ℓ, d), blocks of one head each.
        landmarks: (B, H_kv, capacity, d), keys of landmarks; block number n, counted from the first one ever added, is
            in row n mod capacity.
        ages: (B, H, H_kv or 1, T or 1, q), integer, the blocks of each query, oldest first; 1 is the newest block. 1
            where all heads, or all queries, share their blocks.
        added: blocks ever added; a tensor (), int64, is read by the kernel alone, which may be in a CUDA graph.
        recent: number of newest blocks with a lag of their own (`landmark.memory.positions.attending_lag`).
        rows: (B, H, T or 1, q), the row of each block in keys and values; None: these are (B, H_kv, capacity, ℓ, d),
            flattened, with the rows of landmarks.
        local: output (B, H, T, d) and log-sum-exp (B, H, T) of local attention; None: attention to the blocks alone.
        weight: (B, H, T), factor of the output; None: 1.
        selected: (B, H, T), bool, queries that retrieve; the output of others is 0. None: all retrieve.
        alpha: how much of the log-sum-exp of a block's scores is added to its gate.
        splits: programs that share the blocks of a query; None: as many as fill the GPU.

    Returns (B, H, T, d).
    """
    from landmark.attention.fused.retrieved_blocks_kernel import merged_splits, retrieved_blocks

    lags, batch, queries, heads, dim = rotated_queries.shape
    rows_of_landmarks = landmarks.flatten(0, 2)
    sets, count = ages.shape[1], ages.shape[-1]
    shared = ages.shape[2] == 1 and queries > 1 and (rows is None or rows.shape[2] == 1)
    rows = None if rows is None else rows.expand(batch, heads, -1, -1).contiguous()
    out = rotated_queries.new_empty(batch, heads, queries, dim)
    local_out, local_lse = (out, out) if local is None else (x.contiguous() for x in local)
    weight = None if weight is None else weight.float().contiguous()
    selected = None if selected is None else selected.to(torch.int8).contiguous()
    options = constants(keys.shape[1], dim, rotated_queries.dtype, shared=shared)
    ages = ages if shared else ages.expand(-1, -1, queries, -1)
    tiles = -(-queries // options["M"])
    splits = splits or _splits(count, tiles * heads * batch, out.device)
    parts = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
    lse = parts if splits == 1 else parts.new_empty(parts.shape[:-1])
    of_queries = out if weight is None else weight, out if selected is None else selected
    number, counter = (0, added) if isinstance(added, Tensor) else (added, ages)
    fixed = {"WEIGHTED": weight is not None, "MASKED": selected is not None, "SPLITS": splits}
    with on_device_of(rotated_queries):
        retrieved_blocks[(tiles * splits, heads, batch)](
            *(rotated_queries, keys, values, rows_of_landmarks, ages, ages if rows is None else rows),
            *(local_out, local_lse, *of_queries, parts, lse, counter),
            *(*rotated_queries.stride(), *keys.stride(), *values.stride(), *rows_of_landmarks.stride(), *ages.stride()),
            *(queries, heads, landmarks.shape[1], sets, count, number, landmarks.shape[2], lags, recent),
            LOCAL=local is not None,
            IN_PLACE=rows is None,
            ALPHA=alpha,
            COUNTED=isinstance(added, Tensor),
            **fixed,
            **options,
        )
        if splits > 1:
            of_merge, all_queries = merge_constants(dim), batch * heads * queries
            grid = (-(-all_queries // of_merge["M"]),)
            merged_splits[grid](parts, lse, *of_queries, out, all_queries, **fixed, **of_merge)
    return out


def _splits(count: int, programs: int, device: torch.device) -> int:
    """Programs that share `count` blocks where there are so many programs without that."""
    if is_interpreted():
        return 1
    return max(1, min(count // LEAST, _processors(device) // programs))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def merge_constants(dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel that merges. dim: d, numbers of a head."""
    return {"D": dim, "BLOCK_D": padded(dim), "M": 4, "num_warps": 4, "num_stages": 1}


def constants(block_size: int, dim: int, dtype: torch.dtype, *, shared: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel.

    Args:
        block_size: ℓ, normal tokens of a block.
        dim: d, numbers of a head.
        dtype: type of queries, keys and values.
        shared: whether all queries share their blocks; else a tile is one query.
    """
    fixed, load = of_whole_blocks(block_size, dim, dtype)
    return fixed | {
        "M": (max(16, QUERIES // max(1, load)) if dtype.itemsize == 2 else 16) if shared else 1,
        "SHARED": shared,
        "num_warps": 8 if load > 1 or (shared and dim > 64) else 4,
    }
