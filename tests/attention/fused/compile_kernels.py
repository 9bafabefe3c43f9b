"""Compiles the fused kernels for GPUs that need not be there, and prints what each takes, as JSON:

    python -m tests.attention.fused.compile_kernels sm_90 "HEAD_DIM BLOCK_SIZE [cmt] [packed] [float32]" …

A process of its own: under TRITON_INTERPRET=1 nothing can be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from landmark.attention.fused import retrieved_blocks as block_kernel
from landmark.attention.fused import tuning
from landmark.attention.fused.retrieved_blocks_kernel import retrieved_blocks

POINTERS = dict.fromkeys(("Lse", "Delta", "DCmtScores", "CmtScores", "ControlledLse", "LocalLse", "Weight"), "fp32")
POINTERS |= {"Phase": "i32", "Starts": "i32", "Controlled": "i8", "Selected": "i8"}
POINTERS |= dict.fromkeys(("Rows", "Places", "Lags"), "i64")


def compiled(kernel: Callable[..., Any], options: dict[str, Any], arch: int, dtype: torch.dtype) -> dict[str, int]:
    """Registers, bytes of stack (where spilled registers go) and of shared memory of a kernel, and how many of its
    matrix products are not those of a group of warps (wgmma, from sm_90 on)."""
    compiler = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    of_numbers = "fp32" if dtype == torch.float32 else "bf16"
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        value = 1 if name.endswith("_d") else options.get(name)  # heads are stored number by number, as they always are
        if value is not None:
            signature[name], constants[number,] = "constexpr", value
            continue
        is_pointer = name[0].isupper()
        signature[name] = f"*{POINTERS.get(name, of_numbers)}" if is_pointer else "fp32" if "scale" in name else "i32"
        if is_pointer or name[1:2] == "_" or name[2:3] == "_":  # addresses and strides
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compiler)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", used)}
    by_warps = made.asm["ttgir"].count("= tt.dot ")
    return {"registers": found["REG"], "stack": found["STACK"], "shared": made.metadata.shared, "by_warps": by_warps}


def all_kernels(
    arch: int, dim: int, block_size: int, dtype: torch.dtype, cmt: bool, packed: bool
) -> dict[str, dict[str, int]]:
    """By name, in their default configurations."""
    used = {}
    for name in ("forward", "backward_queries", "backward_keys"):
        tiles = tuning.choices(name, block_size, dim, dtype.itemsize, arch, cmt)[0]
        options = tuning.as_options(tiles)
        options |= tuning.constants(block_size, dim, dtype, cmt=cmt, packed=packed)
        used[name] = compiled(tuning.compiled_by_triton(name), options, arch, dtype)
    for shared in (False, True):
        options = block_kernel.constants(block_size, dim, dtype, shared=shared)
        options |= {"LOCAL": not cmt, "WEIGHTED": cmt, "MASKED": cmt}
        used[f"retrieved_blocks, {shared=}"] = compiled(retrieved_blocks, options, arch, dtype)
    return used


if __name__ == "__main__":
    arch, found = int(sys.argv[1].removeprefix("sm_")), {}
    for words in sys.argv[2:]:
        dim, block_size, *flags = words.split()
        dtype = torch.float32 if "float32" in flags else torch.bfloat16
        found[words] = all_kernels(arch, int(dim), int(block_size), dtype, "cmt" in flags, "packed" in flags)
    print(json.dumps(found))
