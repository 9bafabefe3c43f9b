"""The types of a .gguf file's tensors, as integers, scales and minima: a weight is integer · scale + minimum.

Formats: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_LOW = 0x0F0F0F0F0F0F0F0F
_EIGHT = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) * 16).to(torch.uint8).view(torch.int64).flatten()


@dataclass(frozen=True)
class Kind:
    """A type whose blocks of `block` weights take `bytes` bytes, with a scale for `group` of them.

    bits: of an integer. centre: is subtracted from integers so that they lie around 0.
    """

    block: int
    bytes: int
    bits: int
    group: int
    centre: int
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]

    @property
    def planes(self) -> int:
        """Integers of four bits that hold one of this type."""
        return 1 if self.bits == 4 else 2


def integers(kind: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The integers (R, K) int8, scales (R, K / group) and minima (R, K / group; None: all are 0) of rows of bytes.

    rows: (R, bytes of a row), of a name of `KINDS`. Scales and minima are float32.
    """
    count = len(rows)
    blocks = rows.reshape(-1, KINDS[kind].bytes)
    whole, scales, minima = KINDS[kind].read(blocks)
    minima = None if minima is None else minima.view(count, -1)
    return whole.view(torch.int8).view(count, -1), scales.view(count, -1), minima


def dequantised(kind: str, rows: Tensor) -> Tensor:
    """The weights (R, K) of rows of bytes (R, bytes of a row), in float32, as llama.cpp computes them."""
    if kind in PLAIN:
        return rows.contiguous().view(PLAIN[kind]).float()
    whole, scales, minima = integers(kind, rows)
    weights = whole.view(*scales.shape, -1) * scales[..., None]
    return (weights if minima is None else weights.add_(minima[..., None])).flatten(1)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """A float16 number of each block, (B, 1) float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, start: int, end: int, width: int) -> Tensor:
    """Integers of four bits (B, 2 · bytes): of each `width` bytes the low halves, then the high ones."""
    eight = blocks[:, start:end].contiguous().view(torch.int64).unflatten(1, (-1, 1, width // 8))
    return torch.cat([eight & _LOW, eight >> 4 & _LOW], 2).flatten(1).view(torch.uint8)


def _bits(packed: Tensor, shifts: Iterable[int], mask: int) -> Tensor:
    """Fields of bytes (B, n): those at the first shift, then those at the second one, and so on: (B, n · shifts)."""
    return torch.cat([packed >> shift & mask for shift in shifts], 1)


def _fifth(blocks: Tensor, start: int) -> Tensor:
    """The fifth bits, as 16 or 0, of 32 integers, in four bytes."""
    return _EIGHT[blocks[:, start : start + 4].long()].view(torch.uint8)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight groups, of six bits each, in the bytes 4 to 15 of a block."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], 1)
    minima = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], 1)
    return _halves(blocks, 0) * scales, -(_halves(blocks, 2) * minima)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _nibbles(blocks, 2, 18, 16) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks, 4, 20, 16), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _nibbles(blocks, 6, 22, 16).bitwise_or_(_fifth(blocks, 2)).sub_(16), _halves(blocks, 0), None


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks, 8, 24, 16).bitwise_or_(_fifth(blocks, 4)), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return blocks[:, 2:34].contiguous(), _halves(blocks, 0), None


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks, 16, 144, 32), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fifth = _bits(blocks[:, 16:48], range(8), 1)
    return _nibbles(blocks, 48, 176, 32) | fifth << 4, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    high = torch.cat([_bits(blocks[:, start : start + 32], [0, 2, 4, 6], 3) for start in (128, 160)], 1)
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (_nibbles(blocks, 0, 128, 64) | high << 4) - 32, scales, None


KINDS = {
    "Q4_0": Kind(32, 18, 4, 32, 0, _q4_0),
    "Q4_1": Kind(32, 20, 4, 32, 8, _q4_1),
    "Q5_0": Kind(32, 22, 5, 32, 0, _q5_0),
    "Q5_1": Kind(32, 24, 5, 32, 16, _q5_1),
    "Q8_0": Kind(32, 34, 8, 32, 0, _q8_0),
    "Q4_K": Kind(256, 144, 4, 32, 8, _q4_k),
    "Q5_K": Kind(256, 176, 5, 32, 16, _q5_k),
    "Q6_K": Kind(256, 210, 6, 16, 0, _q6_k),
}
