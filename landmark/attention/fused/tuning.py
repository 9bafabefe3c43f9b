"""The sizes of the kernels' tiles: for each shape a default and other choices.

On the first large input all choices are measured, once for each kind of GPU, block size, head dimension and type. The
fastest is kept in Triton's cache on disk. Small inputs, inputs that are not on a GPU, and
`torch.use_deterministic_algorithms(True)` use the default, which spills no register, but for `backward` on sm_90: there
two programs on a processor that spill a little are faster than one of twice the queries (benchmarks/README.md).
"""

import functools
import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIR = "backward_queries", "backward_keys"  # the gradients by two kernels, the same numbers every time
KERNELS = "forward", "backward", *PAIR  # "backward": all gradients, without a context miss token
WORTH_TUNING = 1 << 17  # rows of all heads; smaller inputs use the default
LARGEST_BLOCK = 1 << 15  # bytes of a block's padded keys: the gradients of a larger block do not fit into registers
LONGEST_BLOCK = 128  # positions of a padded block: the softmax of a longer one does not fit into registers
NARROW_HEADS = 64  # largest dimension of heads that leave registers for larger tiles
LANDMARKS = 64  # that a program of the kernel for the best landmarks scores
MOST_BLOCKS = 16  # of them that it can keep; of more, it would keep most
OLDEST = 80  # compute capability: for older GPUs Triton multiplies without matrix instructions

# By kernel and GPU family: (queries of a tile, warps, pipeline stages) for keys of dimension 128 in half precision. The
# first is the default; those of forward and backward for sm_90 were the fastest on an H200 wherever W is 64.
CHOICES = {
    ("forward", 90): [(128, 8, 3), (128, 8, 2), (64, 4, 3), (64, 4, 2)],
    ("backward_queries", 90): [(128, 8, 2), (128, 8, 1), (64, 4, 1), (64, 8, 2)],
    ("backward_keys", 90): [(128, 8, 1), (64, 8, 2), (128, 8, 2), (64, 4, 1), (64, 8, 1)],
    ("backward", 90): [(64, 4, 1), (64, 4, 2), (128, 8, 1)],
    ("forward", 80): [(64, 8, 2), (128, 8, 2), (64, 8, 3)],
    ("backward_queries", 80): [(64, 8, 2), (64, 8, 1), (32, 4, 2)],
    ("backward_keys", 80): [(64, 8, 1), (32, 8, 1), (32, 8, 2)],
    ("backward", 80): [(64, 8, 1), (32, 8, 1), (32, 4, 1)],
}
IN_FLOAT32 = [(32, 8, 1), (16, 4, 1)]  # multiplied in registers, without matrix instructions
# The default with narrow heads, and with a context miss token, which needs more registers; missing: the first choice.
WITH_NARROW_HEADS = {("forward", 80): (128, 8, 2), ("backward", 90): (64, 4, 2), ("backward", 80): (32, 4, 1)}
WITH_CONTEXT_MISS = {("backward_keys", 90): (64, 8, 1), ("backward_queries", 80): (64, 8, 1)}
WITH_LONG_BLOCKS = {  # of more than 64 positions, with narrow heads
    **dict.fromkeys([("forward", 90), ("forward", 80)], (64, 8, 2)),
    **dict.fromkeys([("backward_keys", 90), ("backward_queries", 80)], (32, 8, 1)),
    **dict.fromkeys([("backward", 90), ("backward", 80)], (32, 8, 1)),
}
WITH_MUCH = {("backward_keys", 90): (64, 8, 1)}  # with wide heads, or with long blocks: of half the queries


@dataclass(frozen=True)
class Gpu:
    """What the choice of tiles depends on: 10 · major + minor version, and bytes of shared memory of a program."""

    capability: int
    shared_memory: int


A100 = Gpu(80, 163 << 10)


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles of a kernel.

    queries: of a tile. group: blocks of a tile of keys. segment: columns of each block. warps, stages: of a program.
    lean: whether loop invariants are computed again for each tile of a loop, which needs fewer registers on sm_90.
    """

    queries: int
    group: int
    segment: int
    warps: int
    stages: int
    lean: bool


@functools.cache
def choices(kernel: str, block_size: int, dim: int, element_size: int, gpu: Gpu, cmt: bool) -> tuple[Tiles, ...]:
    """Tiles that the GPU's shared memory holds, the default first. Empty: the kernel cannot be launched.

    A tile has about 64 keys, or more where a block is longer. Wider heads, longer blocks and less shared memory have
    fewer queries. Registers that the defaults spill: benchmarks/results/ahead-of-time.md. "backward" does not know the
    context miss token, and spills registers in float32 and where tiles hold more.
    """
    segment = 1 << block_size.bit_length()  # the power of two from ℓ+1 up
    group = max(1, 64 // segment)
    load = group * segment * padded(dim) * element_size // (64 * 128 * 2)  # 1 at 64 halves of dimension 128
    if kernel == "backward" and (cmt or load > 1 or element_size > 2):
        return ()
    found = []
    family = 90 if 90 <= gpu.capability < 120 else 80  # GPUs with as much shared memory as sm_90
    narrow = {} if padded(dim) > NARROW_HEADS else WITH_LONG_BLOCKS if segment > 64 else WITH_NARROW_HEADS
    preferred = (WITH_MUCH if load > 1 else WITH_CONTEXT_MISS if cmt else narrow).get((kernel, family))
    tried = IN_FLOAT32
    if element_size == 2:
        tried = CHOICES[kernel, family]
        tried = tried if preferred is None else [preferred, *(each for each in tried if each != preferred)]
    for number, (queries, warps, stages) in enumerate(tried):
        queries = max(16, queries // max(1, load))
        lean = family == 90 and not (kernel == "backward_keys" and load > 1 and number == 0)
        chosen = Tiles(queries, group, segment, warps, stages if load <= 1 else 1, lean)
        while chosen.queries > 16 and shared_memory(kernel, chosen, dim, element_size) > gpu.shared_memory:
            chosen = replace(chosen, queries=chosen.queries // 2)
        if chosen not in found and shared_memory(kernel, chosen, dim, element_size) <= gpu.shared_memory:
            found.append(chosen)
    return tuple(found)


def shared_memory(kernel: str, tiles: Tiles, dim: int, element_size: int) -> int:
    """Bytes of shared memory that a kernel takes at most: a bound that compiled kernels keep."""
    columns = tiles.segment * tiles.group
    keys, queries = (rows * padded(dim) * element_size for rows in (columns, tiles.queries))
    scores = tiles.queries * columns * element_size
    if is_over_keys(kernel):
        scores *= element_size // 2
        buffers = tiles.stages + (element_size == 2 and not tiles.lean)
        return (3 if kernel == "backward" else 2) * keys + 2 * buffers * queries + scores + 1024
    return 2 * tiles.stages * keys + max(queries * (1 if kernel == "forward" else 2), scores) + 1024


def is_over_keys(kernel: str) -> bool:
    """Whether a program has a tile of keys and goes over the queries; else the other way round."""
    return kernel in ("backward", "backward_keys")


def padded(size: int) -> int:
    """The smallest power of two that is at least `size` and 16, the least size of Triton's matrix products."""
    return max(16, 1 << (size - 1).bit_length())


@torch.compiler.assume_constant_result
def can_launch(block_size: int, dim: int, element_size: int, device: torch.device) -> bool:
    """Whether the GPU's shared memory and registers hold whole blocks, as the kernels need."""
    gpu, positions = gpu_of(device), padded(block_size + 1)
    if gpu.capability < OLDEST or positions > LONGEST_BLOCK or positions * padded(dim) * element_size > LARGEST_BLOCK:
        return False
    return all(choices(kernel, block_size, dim, element_size, gpu, cmt=True) for kernel in ("forward", *PAIR))


def is_in_one(q: Tensor, block_size: int, *, cmt: bool) -> bool:
    """Whether one kernel computes all gradients, in any order: not where algorithms must be deterministic."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return bool(choices("backward", block_size, q.shape[3], q.element_size(), gpu_of(q.device), cmt))


def is_interpreted() -> bool:
    """Whether Triton runs its kernels as Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def constants(
    block_size: int, dim: int, dtype: torch.dtype, *, cmt: bool, packed: bool, alpha: float = 0.0
) -> dict[str, Any]:
    """Compile-time constants of a kernel, except those of its tiles. packed: samples are packed into one row."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    fixed = {"W": block_size + 1, "D": dim, "BLOCK_D": padded(dim), "PRECISION": precision}
    return fixed | {"CMT": cmt, "PACKED": packed, "ALPHA": alpha}


def launch(
    kernel: str, *arguments: Any, over: Tensor, block_size: int, cmt: bool, samples: int | None, alpha: float
) -> None:
    """Run a kernel over tiles of queries, or of keys, which must fit (`can_launch`).

    arguments: without compile-time constants. over: (B, H, rows, d), the queries or keys. samples: packed into the
    rows; None: each element of the batch is one sample.
    """
    batch, heads, rows, dim = over.shape
    tried = choices(kernel, block_size, dim, over.element_size(), gpu_of(over.device), cmt)

    def grid(chosen: dict[str, Any]) -> tuple[int, int, int]:
        step = chosen["GROUP"] * (block_size + 1) if is_over_keys(kernel) else chosen["M"]
        # A first block may be short, and so may each sample's first and last tile.
        tiles = -(-(rows + block_size) // step) if is_over_keys(kernel) else -(-rows // step)
        return tiles if samples is None else rows // step + 2 * samples, heads, batch

    fixed = constants(block_size, dim, over.dtype, cmt=cmt, packed=samples is not None, alpha=alpha)
    with on_device_of(over):
        if torch.are_deterministic_algorithms_enabled() or is_interpreted() or batch * heads * rows < WORTH_TUNING:
            compiled_by_triton(kernel)[grid](*arguments, **fixed, **as_options(kernel, tried[0]))
        else:
            tuned(kernel, tried)[grid](*arguments, **fixed)


def compiled_by_triton(kernel: str) -> Any:
    """The kernel with this name. Triton is imported here, when a kernel is first run."""
    from landmark.attention.fused import kernels

    return getattr(kernels, "backward_keys" if is_over_keys(kernel) else kernel)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's device is the current one: Triton launches kernels there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def as_options(kernel: str, chosen: Tiles) -> dict[str, int]:
    """The tiles by the names of Triton's compile-time constants and options."""
    sizes = {"M": chosen.queries, "GROUP": chosen.group, "SEGMENT": chosen.segment, "LEAN": chosen.lean}
    if is_over_keys(kernel):
        sizes["ALL"] = kernel == "backward"
    return sizes | {"num_warps": chosen.warps, "num_stages": chosen.stages}


@functools.cache
def tuned(kernel: str, tried: Sequence[Tiles]):
    """The kernel, with tiles that Triton measures once for each type and set of compile-time constants."""
    import triton

    configs = []
    for chosen in tried:
        sizes = as_options(kernel, chosen)
        options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
        configs.append(triton.Config(sizes, **options))
    key = ["W", "D", "CMT", "ALPHA", "PACKED"]
    sums = ["DqSum"] if kernel == "backward" else []  # to which each measurement adds
    return triton.autotune(configs, key, reset_to_zero=sums, cache_results=True)(compiled_by_triton(kernel))


def gpu_of(device: torch.device) -> Gpu:
    """The GPU with this device; an A100 where kernels are interpreted."""
    if is_interpreted():
        return A100
    properties = torch.cuda.get_device_properties(device)
    return Gpu(10 * properties.major + properties.minor, properties.shared_memory_per_block_optin)
