"""A query's blocks shared by several programs of a Triton kernel: how many, and the kernel that merges them."""

# Triton's language only looks like Python.
# pyright: reportGeneralTypeIssues=false
from typing import Any

import torch
import triton
import triton.language as tl

from landmark.attention.fused.tuning import is_interpreted, padded

LEAST = 4  # blocks of a program: the kernel that merges takes as long as about so many


def splits_of(count: int, programs: int, device: torch.device) -> int:
    """Programs that share `count` blocks where there are so many programs without that."""
    if is_interpreted():
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(count // LEAST, processors // programs))


def merge_constants(dim: int) -> dict[str, Any]:
    """Compile-time constants of the kernel that merges. dim: d, numbers of a head."""
    return {"D": dim, "BLOCK_D": padded(dim), "M": 4, "num_warps": 4, "num_stages": 1}


@triton.jit
def weighted(acc, Weight, Selected, row_index, row_ok, WEIGHTED: tl.constexpr, MASKED: tl.constexpr):
    """Outputs (M, D) times the weights of their queries, 0 for those that do not retrieve."""
    if WEIGHTED:
        acc = acc * tl.load(Weight + row_index, mask=row_ok, other=0.0)[:, None]
    if MASKED:
        selected = tl.load(Selected + row_index, mask=row_ok, other=0) != 0
        acc = tl.where(selected[:, None], acc, 0.0)
    return acc


@triton.jit(do_not_specialize=["rows"])
def merged_splits(
    Parts, Lse, Weight, Selected, Out, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Outputs of M queries. Parts: (split, rows, D). Lse: (split, rows), of the parts, in units of log 2."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    row_ok, d = row < rows, tl.arange(0, BLOCK_D)
    here = row_ok[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    running = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        lse = tl.load(Lse + split * rows.to(tl.int64) + row, mask=row_ok, other=float("-inf"))
        larger = tl.maximum(running, lse)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        share, rescale = tl.exp2(lse - safe), tl.exp2(running - safe)
        part = tl.load(Parts + split * rows.to(tl.int64) * D + at, mask=here, other=0.0)
        acc = acc * rescale[:, None] + part * share[:, None]
        total = total * rescale + share
        running = larger
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    acc = weighted(acc, Weight, Selected, row, row_ok, WEIGHTED, MASKED)
    tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=here)
