"""Checks that a competitor is exact, before it is timed."""

from collections.abc import Sequence

from torch import Tensor

FLOAT64_TOLERANCE = 1e-10  # largest difference, relative to the largest number
FLOAT32_FACTOR = 2.0  # largest error against float64, relative to that of plain PyTorch in float32


class Inexact(Exception):
    """A competitor computes a wrong result."""


def check_float64(name: str, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise Inexact if float64 outputs differ from those of an independent computation."""
    for i, (output, exact) in enumerate(zip(outputs, expected, strict=True)):
        error = float((output - exact).abs().max() / exact.abs().max().clamp(min=1.0))
        if not error <= FLOAT64_TOLERANCE:
            raise Inexact(f"{name}: tensor {i} is off by {error:.1e} in float64, more than {FLOAT64_TOLERANCE:.0e}")


def check_float32(name: str, outputs: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Raise Inexact if the error of float32 outputs is more than FLOAT32_FACTOR times that of plain PyTorch.

    name: for the message. outputs: float32, of the competitor. plain: float32, of plain PyTorch. exact: float64.
    """
    for i, (output, other, truth) in enumerate(zip(outputs, plain, exact, strict=True)):
        error, allowed = relative_error(output, truth), FLOAT32_FACTOR * relative_error(other, truth)
        if not error <= allowed:
            raise Inexact(f"{name}: tensor {i} is off by {error:.1e} in float32, more than {allowed:.1e}")


def relative_error(output: Tensor, exact: Tensor) -> float:
    return float((output.double() - exact).norm() / exact.norm())
