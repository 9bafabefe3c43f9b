"""Rotary positions by one kernel: each number is read once and written once.

In complex arithmetic three kernels take turns, through copies in float32.
"""

# Triton's language only looks like Python, and kernels get their compile-time constants by name.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from landmark.attention.fused.tuning import on_device_of, padded

ROWS = 32  # of a program


def rotate_on_gpu(x: Tensor, factors: Tensor, backwards: bool) -> Tensor:
    """As `landmark.attention.rotary.rotation`."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    batch, heads, length, dim = x.shape
    factors, tiles = factors.contiguous().expand(batch, heads, length, dim // 2, 2), -(-length // ROWS)
    with on_device_of(x):
        rotated[(batch * heads * tiles,)](
            *(x, factors, out, *x.stride(), *factors.stride()[:3], *out.stride(), length, heads, tiles),
            -1.0 if backwards else 1.0,
            PAIRS=dim // 2,
            BLOCK=padded(dim // 2),
            ROWS=ROWS,
        )
    return out


@triton.jit(do_not_specialize=["length", "heads", "tiles"])
def rotated(
    X, Factors, Out,
    x_b, x_h, x_t, x_d, f_b, f_h, f_t, o_b, o_h, o_t, o_d,
    length, heads, tiles, direction,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS rows of one head by their angles, times `direction` (1, or −1 for the gradient), in float32.

    Programs are numbered along one axis, (batch · heads) · tiles: the others have no more than 65,535.
    """
    program = tl.program_id(0).to(tl.int64)
    tile, head, batch = program % tiles, program // tiles % heads, program // tiles // heads
    row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    here = (row < length) & (pair < PAIRS)
    factors = Factors + batch * f_b + head * f_h + row * f_t + 2 * pair
    cosine = tl.load(factors, mask=here, other=0.0)
    sine = tl.load(factors + 1, mask=here, other=0.0) * direction
    at = X + batch * x_b + head * x_h + row * x_t + 2 * pair * x_d
    even = tl.load(at, mask=here, other=0.0).to(tl.float32)
    odd = tl.load(at + x_d, mask=here, other=0.0).to(tl.float32)
    out = Out + batch * o_b + head * o_h + row * o_t + 2 * pair * o_d
    tl.store(out, (even * cosine - odd * sine).to(Out.dtype.element_ty), mask=here)
    tl.store(out + o_d, (even * sine + odd * cosine).to(Out.dtype.element_ty), mask=here)
