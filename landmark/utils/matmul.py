"""How the CPU multiplies float32 matrices, chosen by a probe of speed and error.

`torch.set_float32_matmul_precision("medium")` lets PyTorch give them to oneDNN. Some processors then compute the same
float32 products much faster than PyTorch's usual library does. Others, with instructions for bfloat16, may round the
numbers. So `auto` tries both, and takes "medium" only where it is faster and as exact.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HIGHEST, MEDIUM = "highest", "medium"
FASTER = 1.15  # "medium" must be this much faster: a smaller gain cannot be told from the noise of a busy machine
AS_EXACT = 2.0  # and have at most this times the error
ROUNDS = 15  # the best one counts, so that a busy machine finds what it finds when it is idle
SHAPES = ((16, 102, 128, 510), (1, 512, 512, 512))  # batch, rows, inner, columns: a tile of attention, and a layer


def set_matmul(setting: str) -> str:
    """Set how this process multiplies float32 matrices on the CPU. Returns what was chosen, "highest" or "medium".

    setting: "highest", "medium", or "auto", which probes once in a process.
    """
    chosen = probe() if setting == "auto" else setting
    torch.set_float32_matmul_precision(chosen)
    return chosen


@functools.cache
def probe() -> str:
    """The precision that is fast and exact on this processor, with the present number of threads."""
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(batch, rows, inner, generator=generator), torch.randn(batch, inner, columns, generator=generator))
        for batch, rows, inner, columns in SHAPES
    ]
    errors = {precision: max(_error(a, b, precision) for a, b in pairs) for precision in (HIGHEST, MEDIUM)}
    if errors[MEDIUM] > AS_EXACT * errors[HIGHEST]:
        return HIGHEST
    gains = []
    for a, b in pairs:
        seconds = [(_seconds(a, b, HIGHEST), _seconds(a, b, MEDIUM)) for _ in range(ROUNDS)]
        highest, medium = (min(each) for each in zip(*seconds, strict=True))
        gains.append(highest / medium)
    return MEDIUM if min(gains) >= 1 / FASTER and max(gains) >= FASTER else HIGHEST


def _error(a: Tensor, b: Tensor, precision: str) -> float:
    """The largest error of the product, compared with its largest number."""
    exact = a.double() @ b.double()
    with _precision(precision):
        return float(((a @ b).double() - exact).abs().max() / exact.abs().max())


def _seconds(a: Tensor, b: Tensor, precision: str) -> float:
    with _precision(precision):
        started = time.perf_counter()
        a @ b  # pyright: ignore[reportUnusedExpression]
        return time.perf_counter() - started


@contextmanager
def _precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
