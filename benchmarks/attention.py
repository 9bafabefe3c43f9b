"""Landmark attention, forward and backward, against PyTorch's causal attention at the same shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.exactness import check_float32, check_float64
from benchmarks.report import Report, Row, Target, compare, megabytes, milliseconds
from benchmarks.settings import BLOCK_SIZE, Options, Say
from benchmarks.timing import interleave, peak_of_new_process
from landmark.attention import Window, landmark_attention

PLAIN = "causal SDPA"
LANDMARK = "landmark"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One setting.

    bound: target for the ratio of times. checked: (B, H) of the exactness check, smaller where float64 weights would
    not fit into memory. peaks: whether peak memory is measured too.
    """

    length: int
    head_dim: int
    rounds: int
    bound: float
    batch: int = 4
    heads: int = 8
    checked: tuple[int, int] = (4, 2)
    peaks: bool = False

    def __str__(self) -> str:
        return f"T={self.length}, d={self.head_dim}"

    def inputs(self, batch: int, heads: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """q, k, v and the gradient of the output, (B, H, T, d) each; and phases (B,)."""
        generator = torch.Generator().manual_seed(self.length + self.head_dim)
        size = batch, heads, self.length, self.head_dim
        tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
        return tensors, torch.randint(0, BLOCK_SIZE + 1, (batch,), generator=generator)


def shapes(quick: bool) -> list[Shape]:
    if quick:
        return [Shape(130, 8, 2, 1.15, 2, 2, (2, 2)), Shape(204, 16, 2, 1.4, 2, 2, (1, 1), peaks=True)]
    short = [(128, 1.15), (64, 1.25), (32, 1.25)]
    return [
        *(Shape(512, dim, 15, bound) for dim, bound in short),
        Shape(4096, 64, 3, 1.4, checked=(1, 1), peaks=True),
    ]


def run(options: Options, say: Say) -> Report:
    rows: list[Row] = []
    for shape in shapes(options.quick):
        say(f"{shape}: exactness")
        check(shape)
        say(f"{shape}: forward and backward")
        seconds = interleave(competitors(shape), rounds=shape.rounds)
        rows += compare(
            "attention", str(shape), "ms", milliseconds(seconds), PLAIN, {LANDMARK: Target("≤", shape.bound)}
        )
        if shape.peaks:
            say(f"{shape}: peak memory, each in a new process")
            measured = (PLAIN, LANDMARK) if options.quick else seconds
            peaks = {name: peak_of_new_process("attention", name, options.quick) for name in measured}
            rows += compare("attention", f"{shape}, peak", "MB", megabytes(peaks), PLAIN)
    return Report(rows)


def check(shape: Shape) -> None:
    """Raise Inexact unless outputs and gradients equal those of the equations with explicit weights."""
    phase = shape.inputs(*shape.checked, torch.float64)[1]
    reference, ours = landmark(phase, "reference"), landmark(phase)
    exact = gradients(reference, shape, torch.float64)
    plain = gradients(reference, shape, torch.float32)
    check_float64(f"attention {shape}", gradients(ours, shape, torch.float64), exact)
    check_float32(f"attention {shape}", gradients(ours, shape, torch.float32), plain, exact)


def gradients(attend: Attention, shape: Shape, dtype: torch.dtype) -> Sequence[Tensor]:
    """The output, and the gradients of q, k and v."""
    (*inputs, grad), _ = shape.inputs(*shape.checked, dtype)
    return forward_backward(attend, inputs, grad)()


def competitors(shape: Shape) -> dict[str, Callable[[], Sequence[Tensor]]]:
    (*inputs, grad), phase = shape.inputs(shape.batch, shape.heads, torch.float32)
    attends = {PLAIN: causal, LANDMARK: landmark(phase)}
    return {name: forward_backward(attend, inputs, grad) for name, attend in attends.items()}


def forward_backward(attend: Attention, inputs: list[Tensor], grad: Tensor) -> Callable[[], Sequence[Tensor]]:
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> Sequence[Tensor]:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return step


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def landmark(phase: Tensor, backend: str = "auto") -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return landmark_attention(q, k, v, Window(BLOCK_SIZE, phase), backend=backend)[0]

    return attend


def run_once(name: str, quick: bool) -> None:
    (shape,) = (shape for shape in shapes(quick) if shape.peaks)
    competitors(shape)[name]()
