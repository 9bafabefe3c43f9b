"""What is checked and timed: shapes, their numbers, and the attention functions that are compared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from landmark.attention import Window, landmark_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scale:
    """What is checked and timed where.

    device: of everything. dtypes, dims, widths: types, d and W. check_length, check_heads, check_group: of the checks
    T, H and query heads for each key head. tokens, width: of the timings B·T and H·d. rounds: of a timing, at most.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    widths: tuple[int, ...]
    check_length: int
    check_heads: int
    check_group: int
    tokens: int
    width: int
    rounds: int

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def half(self) -> torch.dtype:
        """The type that is timed."""
        return self.dtypes[0]


@dataclass(frozen=True)
class Shape:
    """Windows of T = length tokens, H heads of dim numbers, group of them for each key head, blocks of W = width."""

    batch: int
    heads: int
    group: int
    length: int
    dim: int
    width: int

    @classmethod
    def timed(cls, scale: Scale, length: int, dim: int, width: int, group: int = 1) -> "Shape":
        """B and H follow from the tokens and the width of the timings."""
        return cls(max(1, scale.tokens // length), max(group, scale.width // dim), group, length, dim, width)

    def __str__(self) -> str:
        heads = "" if self.group == 1 else f", {self.group}:1 GQA"
        return f"d={self.dim}, W={self.width}, T={self.length}{heads}"

    def inputs(self, scale: Scale, dtype: torch.dtype, keys: int | None = None) -> tuple[list[Tensor], Tensor]:
        """q, k, v and the gradient of the output, the same every time. keys: of each head; None: T."""
        generator = torch.Generator(scale.device).manual_seed(0)
        made = partial(torch.randn, generator=generator, device=scale.device)
        keys = self.length if keys is None else keys
        q, grad = (made(self.batch, self.heads, self.length, self.dim).to(dtype) for _ in range(2))
        k, v = (made(self.batch, self.heads // self.group, keys, self.dim).to(dtype) for _ in range(2))
        return [x.requires_grad_() for x in (q, k, v)], grad

    @property
    def phase(self) -> Tensor:
        """Another one for each sample: the first begins with a block, the second on a landmark."""
        return torch.arange(self.batch) * (self.width - 1) % self.width

    def operations(self, products: int) -> float:
        """FLOPs of so many matrix products of plain causal attention, half of each masked; landmarks do not count."""
        return products * self.batch * self.heads * self.length**2 * self.dim


def landmark(shape: Shape, device: str, backend: str = "triton") -> Attention:
    window = Window(shape.width - 1, shape.phase.to(device if backend == "triton" else "cpu"))
    return lambda q, k, v: landmark_attention(q, k, v, window, backend=backend)[0]


def causal(backend: SDPBackend | None, group: int) -> Attention:
    """PyTorch's causal attention. backend: None: any."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)

    return attend


def flex(shape: Shape, q: Tensor) -> Attention:
    """Landmark attention as an ordinary softmax, with a bias s_landmark − L_b on the scores of earlier blocks.

    The bias is given: computing it and its gradient are not timed. Every tile of the mask holds a landmark that is
    masked, so the mask is applied in all tiles.
    """
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    width, length = shape.width, shape.length
    with torch.no_grad():
        bias = torch.randn(shape.batch, shape.heads, length, -(-length // width), device=q.device, dtype=q.dtype)

    def score(scores, batch, head, query, key):
        own = query // width == key // width
        return torch.where(own, scores, scores + bias[batch, head, query, key // width])

    def visible(batch, head, query, key):
        return (key <= query) & (key % width != width - 1)

    mask = create_block_mask(visible, None, None, length, length, device=q.device.type)
    functorch_config.donated_buffer = False  # the backward pass is run several times
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask, enable_gqa=shape.group > 1)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same numbers every time, without filling new memory with NaN."""
    of_memory: Any = torch.utils.deterministic
    fills, of_memory.fill_uninitialized_memory = of_memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        of_memory.fill_uninitialized_memory = fills
