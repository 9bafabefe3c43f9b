"""What is checked, and what is timed: name, function, seconds expected with an H100. The most important are first."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import checks, kernels, models, pretrained
from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.work import Item
from landmark.attention.fused import tuning

FULL = Scale(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float32, torch.float16),
    dims=(64, 128),
    widths=(64, 51),
    check_length=515,
    check_heads=16,
    check_group=4,
    tokens=65536,
    width=2048,
    rounds=15,
)
TINY = Scale(
    device="cpu",
    dtypes=(torch.float16, torch.float32),
    dims=(16,),
    widths=(8,),
    check_length=21,
    check_heads=2,
    check_group=2,
    tokens=48,
    width=32,
    rounds=3,
)


def items_of(scale: Scale) -> list[Item]:
    """All items."""
    return [*_checks(scale), *_timings(scale)]


def _checks(scale: Scale) -> Iterator[Item]:
    """Those of the type that is timed come first, then those of other kernels, then those of other types."""
    size, context = (models.DECODED, 4_000) if scale.is_gpu else (models.TINY, 300)
    yield Item("tokens as graphs", partial(models.graphs, size, context), 30)
    before = 8_192 if scale.is_gpu else 40
    yield Item("pretrained: tokens as a graph", partial(pretrained.as_operators, before), 30)
    shapes = [(dim, width) for dim in scale.dims[::-1] for width in scale.widths]
    yield from (item for dim, width in shapes for item in _of_shape(scale.half, dim, width))
    yield Item("rotation", checks.rotations, 5)
    yield Item("top-k", checks.best_landmarks, 10)
    yield Item("attention in parts", checks.parts, 10)
    yield Item("tiers", checks.tiers, 10)
    yield from (item for dtype in scale.dtypes[1:] for dim, width in shapes for item in _of_shape(dtype, dim, width))


def _of_shape(dtype: torch.dtype, dim: int, width: int) -> Iterator[Item]:
    about = f"{str(dtype).removeprefix('torch.')} d={dim} W={width}"
    for kernel in tuning.KERNELS:
        if tuning.choices(kernel, width - 1, dim, dtype.itemsize, tuning.A100, False):
            yield Item(f"tiles: {kernel} {about}", partial(checks.tiles, (kernel,), dtype, dim, width), 25)
    for check, seconds in ((checks.layouts, 30), (checks.softmaxes, 40), (checks.pair, 15), (checks.retrieved, 20)):
        yield Item(f"{check.__name__}: {about}", partial(check, dtype, dim, width), seconds)


def _timings(scale: Scale) -> Iterator[Item]:
    dims, widths, lengths = scale.dims[::-1], scale.widths, (4096, 16384) if scale.is_gpu else (24,)

    def flash(length: int, dim: int, width: int, group: int = 1) -> Item:
        name = f"time: windows d={dim} W={width} T={length}" + ("" if group == 1 else f" {group}:1")
        return Item(name, partial(kernels.beside_flash, length, dim, width, group), 15, alone=True)

    for width in widths:
        for dim in dims:
            yield from (flash(length, dim, width) for length in lengths)
    size, contexts = (models.DECODED, (4_000, 128_000, 1_000_000)) if scale.is_gpu else (models.TINY, (150, 300))
    yield Item("time: a token", partial(models.decoding, size, contexts, ""), 40, alone=True)
    if scale.is_gpu:
        large = partial(models.decoding, models.TRAINED["paper"], (4_000, 128_000), "paper: ")
        yield Item("time: paper, a token", large, 40, alone=True)
    texts = (4_096, 32_768, 131_072) if scale.is_gpu else (40,)
    yield Item("time: pretrained, a token", partial(pretrained.tokens, texts), 90, alone=True)
    for name, trained in models.TRAINED.items() if scale.is_gpu else [("tiny", models.TINY)]:
        yield Item(f"time: training step, {name}", partial(models.training, trained, name), 15, alone=True)
    read = (1024, 256, 64, 4) if scale.is_gpu else (5, 6, 8, 2)
    yield Item("time: retrieved blocks", partial(kernels.retrieved_blocks, *read), 10, alone=True)
    texts = (4096, 16384, 65536) if scale.is_gpu else (40,)
    yield Item("time: a chunk that reads blocks", partial(kernels.chunks, texts), 20, alone=True)
    yield flash(lengths[0], dims[0], widths[0], 4 if scale.is_gpu else 2)
    if scale.is_gpu:
        yield from (flash(length, dims[0], widths[0]) for length in (512, 2048, 65536))
        for dim, width in zip(dims, widths, strict=True):
            tiles = partial(kernels.tiles, 16384, dim, width)
            yield Item(f"time: tiles d={dim} W={width}", tiles, 15, alone=True)
        yield Item("time: FlexAttention", partial(kernels.flex_attention, 4096, 128, 64), 60, alone=True)
        gather = partial(kernels.retrieved_blocks, *read, with_gather=True)
        yield Item("time: gather_attn", gather, 150, alone=True)
