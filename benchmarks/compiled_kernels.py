"""Compiles the fused kernels for GPUs that need not be there: `python -m benchmarks.compiled_kernels sm_90 "128 50"`.

The arguments are a GPU's architecture and cases, "HEAD_DIM BLOCK_SIZE [cmt] [packed] [joint] [float32]", or "HEAD_DIM
BLOCK_SIZE tiles [capped]" for the kernels of texts without landmarks. For each case it prints as JSON what each kernel
takes in its default configuration. A process of its own: under TRITON_INTERPRET=1 nothing can be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from landmark.attention.fused import tuning
from landmark.attention.fused.kernels import backward_means
from landmark.attention.fused.operators import means_constants
from landmark.attention.fused.tuning import A100, KERNELS, Gpu
from landmark.memory import splits
from landmark.memory.blocks import decode_kernels as token
from landmark.memory.blocks import prefill_kernels as sparse
from landmark.memory.blocks.attention import AttentionConfig
from landmark.memory.landmarks import reading_kernels as reading
from landmark.memory.landmarks.select import scores_kernels as scores

POINTERS = dict.fromkeys(
    ("Lse", "Delta", "DqSum", "Landmarks", "DCmtScores", "CmtScores", "ControlledLse", "LocalLse", "Weight", "DLse"),
    "fp32",
)
POINTERS |= dict.fromkeys(("Factors", "Exact", "Scores", "Shares", "Means", "Placed", "Turns", "Parts"), "fp32")
POINTERS |= {"Phase": "i32", "Starts": "i32", "Controlled": "i8", "Selected": "i8"}
POINTERS |= dict.fromkeys(
    ("Ages", "Lags", "Rows", "Best", "Added", "Pending", "Listed", "Chosen", "Far", "Position"), "i64"
)
GPUS = {80: A100, 86: Gpu(86, 99 << 10), 90: Gpu(90, 227 << 10), 100: Gpu(100, 227 << 10), 120: Gpu(120, 99 << 10)}


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes.

    stack: bytes of a thread, where spilled registers go. shared: bytes of shared memory.
    allowed: the most that `landmark.attention.fused.tuning` expects the kernel to take, or the GPU has.
    by_warps: matrix products that are not those of a group of warps (wgmma, from sm_90 on).
    """

    stack: int
    shared: int
    allowed: int
    by_warps: int


def compiled(kernel: Any, options: dict[str, Any], arch: int, dtype: torch.dtype) -> Compiled:
    """Compile a Triton kernel.

    kernel: a function of Triton. options: its compile-time constants, and Triton's num_warps and num_stages. arch:
    compute capability, 10 · major + minor version. dtype: of queries, keys and values.
    """
    compiler = {name: options[name] for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    of_numbers = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        value = 1 if name.endswith("_d") else options.get(name)  # heads are stored number by number, as they always are
        if value is not None:
            signature[name], constants[number,] = "constexpr", value
            continue
        is_pointer = name[0].isupper()
        signature[name] = (
            f"*{POINTERS.get(name, of_numbers)}"
            if is_pointer
            else "fp32"
            if "scale" in name or name == "softcap"
            else "i32"
        )
        if is_pointer or name[1:2] == "_" or name[2:3] == "_":  # addresses and strides
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compiler)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"\bSTACK:(\d+)", used)
    by_warps = made.asm["ttgir"].count("= tt.dot ")
    return Compiled(int(stack), made.metadata.shared, GPUS[arch].shared_memory, by_warps)


def all_kernels(
    arch: int, dim: int, block_size: int, dtype: torch.dtype, cmt: bool, packed: bool, alpha: float
) -> dict[str, Compiled]:
    """By name, in their default configurations."""
    used, fixed = {}, tuning.constants(block_size, dim, dtype, cmt=cmt, packed=packed, alpha=alpha)
    for name in KERNELS:
        for tiles in tuning.choices(name, block_size, dim, dtype.itemsize, GPUS[arch], cmt)[:1]:
            expected = min(GPUS[arch].shared_memory, tuning.shared_memory(name, tiles, dim, dtype.itemsize))
            options = tuning.as_options(name, tiles) | fixed
            made = compiled(tuning.compiled_by_triton(name), options, arch, dtype)
            used[name] = replace(made, allowed=expected)
    means = means_constants(dim) | {"ALL": True}
    used["backward_means"] = compiled(backward_means, means, arch, dtype)
    for shared in (False, True):
        options = reading.read_constants(block_size, dim, dtype, shared=shared)
        options |= {
            "LOCAL": not cmt,
            "WEIGHTED": cmt,
            "MASKED": cmt,
            "IN_PLACE": not cmt,
            "ALPHA": alpha,
            "COUNTED": not cmt,
        }
        used[f"retrieved_blocks, {shared=}"] = compiled(reading.retrieved_blocks, options | {"SPLITS": 1}, arch, dtype)
    split = {"WEIGHTED": cmt, "MASKED": cmt, "SPLITS": 4}
    used["merged_splits"] = compiled(splits.merged_splits, splits.merge_constants(dim) | split, arch, dtype)
    for rows in (1, 16):
        options = scores.top_k_constants(rows, dim, k=4) | {"TIED": cmt, "COUNTED": not cmt}
        used[f"top_k_landmarks, {rows=}"] = compiled(scores.best_of_tile, options, arch, torch.float32)
    used["best_of_tiles"] = compiled(scores.best_of_tiles, scores.merge_constants(4), arch, torch.float32)
    used["pending_tokens"] = compiled(
        reading.pending_tokens, reading.pending_constants(block_size + 1, dim), arch, dtype
    )
    return used


def of_tiles(arch: int, dim: int, block_size: int, capped: bool) -> dict[str, Compiled]:
    """The kernels for tiles of ℓ queries, and for a token, of 4 heads that share keys, in half precision, by name."""
    factors = torch.empty(1, dim // 2, 2) if capped else None
    used, sizes = {}, sparse.tile_constants(4 * block_size, dim, block_size, factors)
    sizes |= {"CAPPED": capped, "LISTED": 128}
    sizes |= {"TILE": block_size, "L": block_size, "GROUP": block_size, "WINDOW": 512}
    shares = sizes | {"SEGMENT": sparse.MEANS}
    used["block_shares"] = compiled(sparse.block_shares, shares, arch, torch.bfloat16)
    used["read_blocks"] = compiled(sparse.read_blocks, sizes, arch, torch.bfloat16)
    config = AttentionConfig(block_size, 512, 128, sinks=1, softcap=30.0 if capped else None)
    options = token.constants(4, dim, config, factors, 128) | {"ALL": False}
    used |= {kernel.__name__: compiled(kernel, options, arch, torch.bfloat16) for kernel in token.KERNELS}
    return used


if __name__ == "__main__":
    arch, found = int(sys.argv[1].removeprefix("sm_")), {}
    for words in sys.argv[2:]:
        dim, block_size, *flags = words.split()
        dtype = torch.float32 if "float32" in flags else torch.bfloat16
        alpha = 0.5 if "joint" in flags else 0.0
        if "tiles" in flags:
            kernels = of_tiles(arch, int(dim), int(block_size), "capped" in flags)
        else:
            kernels = all_kernels(arch, int(dim), int(block_size), dtype, "cmt" in flags, "packed" in flags, alpha)
        found[words] = {name: asdict(used) for name, used in kernels.items()}
    print(json.dumps(found))
