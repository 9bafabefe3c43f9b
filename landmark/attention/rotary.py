"""Rotary positions (RoPE): adjacent pairs (2i, 2i+1) rotate together by position · base^(−2i/d).

Rotations compose, R(a)·R(b) = R(a+b), and ⟨R(a)q, R(b)k⟩ depends on a−b alone. So a memory rotates the keys of a block
once, by their offsets 0…ℓ in the block, and each query by its distance from the start of the block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from landmark.attention.fused.tuning import DTYPES, HAS_TRITON
from landmark.attention.layout import text_positions
from landmark.utils.constants import channels_of


def rotary_factors(positions: Tensor, head_dim: int, base: float | Tensor, dtype: torch.dtype) -> Tensor:
    """The rotation of each pair at positions (…), as unit complex numbers (…, d/2) e^{i·angle}; angles are float64.

    base: of the angles (see above); or (d/2,), radians per position of each pair. Complex128 where `dtype`, of the
    tensors to rotate, is float64. Raises ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head dimension, got {head_dim}")
    if isinstance(base, Tensor):
        frequencies = base.to(positions.device, torch.float64)
    else:
        frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angle = positions.to(torch.float64)[..., None] * frequencies
    factors = torch.polar(torch.ones_like(angle), angle)
    return factors if dtype == torch.float64 else factors.to(torch.complex64)


def rotary_frequencies(head_dim: int, base: float, fraction: float) -> float | Tensor:
    """The `base` of `rotary_factors` where only a fraction of the channels turns: the others match at any distance.

    The first ones turn, which turn fastest, as they would if all did.
    """
    if fraction == 1:
        return base
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    return torch.where(pairs < channels_of(fraction, head_dim), base ** -(pairs / head_dim), 0.0)


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate the pairs of x (…, d) by factors, broadcastable to (…, d/2); half precision is rotated in float32.

    On a GPU one kernel does it (fused/rotation.py).
    """
    has_kernel = HAS_TRITON and x.is_cuda and x.dtype in DTYPES and x.ndim == 4 and factors.dtype == torch.complex64
    if has_kernel and _is_within(factors.shape, x.shape):
        return rotation(x, torch.view_as_real(factors.resolve_conj()), False)
    real = x if x.dtype in (torch.float32, torch.float64) else x.float()
    pairs = torch.view_as_complex(real.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)


def rotate_cmt(key: Tensor, table: "RotaryTable") -> Tensor:
    """Rotate the key of a context miss token (…, d) to its position, −1 (paper, Appendix D)."""
    return rotate(key, table(1, 1, key).conj())


def _is_within(factors: torch.Size, x: torch.Size) -> bool:
    """Whether factors (…, d/2) broadcast to (B, H, T, d/2) without making x larger."""
    if len(factors) > len(x) or 2 * factors[-1] != x[-1]:
        return False
    return all(a in (1, b) for a, b in zip(factors[-2::-1], x[-2::-1], strict=False))


@torch.library.custom_op("landmark::rotation", mutates_args=())
def rotation(x: Tensor, factors: Tensor, backwards: bool) -> Tensor:
    """Rotate the pairs of x (B, H, T, d), or by the opposite angles, as the gradient does.

    factors: (…, d/2, 2), float32, cosines and sines, broadcastable to (B, H, T, d/2, 2).
    """
    from landmark.attention.fused.rotation import rotate_on_gpu

    return rotate_on_gpu(x, factors, backwards)


@rotation.register_fake
def _(x, factors, backwards):
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    _, factors, ctx.backwards = inputs
    ctx.save_for_backward(factors)


def _backward(ctx, gradient: Tensor):
    (factors,) = ctx.saved_tensors
    return rotation(gradient, factors, not ctx.backwards), None, None


rotation.register_autograd(_backward, setup_context=_keep)


class RotaryTable:
    """The rotary factors of positions 0, 1, 2, …, computed once and extended when a later position is needed.

    base: as in `rotary_factors`. width: W of blocks whose landmarks take no position (`text_positions`); None: they do.
    """

    def __init__(self, base: float | Tensor = 10000.0, width: int | None = None):
        self.base, self.width = base, width
        self._tables: dict[tuple[int, torch.device, bool], Tensor] = {}
        self._last: tuple[tuple[object, ...], Tensor] = (), torch.empty(0)

    def __call__(self, start: int, length: int, like: Tensor) -> Tensor:
        """Factors (length, d/2) of positions start … start+length−1, for rotating tensors such as `like` (…, d)."""
        key = (like.shape[-1], like.device, like.dtype == torch.float64)
        table = self._tables.get(key)
        if table is None or len(table) < start + length:
            positions = torch.arange(max(1024, 2 * (start + length)), device=like.device)
            positions = positions if self.width is None else text_positions(positions, self.width)
            table = self._tables[key] = rotary_factors(positions, like.shape[-1], self.base, like.dtype)
        return table[start : start + length]

    def several(self, starts: Sequence[int], length: int, like: Tensor) -> Tensor:
        """Factors from several starts, the last one largest, (starts, length, d/2), kept until others are asked for."""
        key = (tuple(starts), length, like.shape[-1], like.device, like.dtype == torch.float64)
        if self._last[0] != key:
            table = self(0, starts[-1] + length, like)
            self._last = key, torch.stack([table[start : start + length] for start in starts])
        return self._last[1]
