"""Compiles the fused kernels for GPUs that need not be there, and prints what each takes, as JSON:

    python -m tests.attention.compile_fused sm_90 HEAD_DIM BLOCK_SIZE [cmt] [packed]

A process of its own: under TRITON_INTERPRET=1 nothing can be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from landmark.attention import fused_kernels, fused_tuning

KERNELS = ("forward", "backward_queries", "backward_keys")
POINTERS = {name: "fp32" for name in ("Lse", "Delta", "Dmiss", "Miss", "Shared")}
POINTERS |= {"Phase": "i32", "Starts": "i32", "Controlled": "i8"}


def compiled(kernel: str, arch: int, dim: int, block_size: int, cmt: bool, packed: bool) -> dict[str, int]:
    """Registers, bytes of stack (where spilled registers go) and of shared memory of a kernel in bfloat16."""
    function = getattr(fused_kernels, kernel)
    tiles = fused_tuning.as_options(fused_tuning.choices(kernel, block_size, dim, 2, arch)[0])
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    chosen = tiles | fused_tuning.constants(block_size, dim, torch.bfloat16, cmt=cmt, packed=packed)
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(function.params):
        name = parameter.name
        value = 1 if name.endswith("_d") else chosen.get(name)  # heads are stored number by number, as they always are
        if value is not None:
            signature[name], constants[number,] = "constexpr", value
            continue
        is_pointer = name[0].isupper()
        signature[name] = f"*{POINTERS.get(name, 'bf16')}" if is_pointer else "fp32" if "scale" in name else "i32"
        if is_pointer or name[-2:] in ("_b", "_h", "_t"):
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", used)}
    return {"registers": found["REG"], "stack": found["STACK"], "shared": made.metadata.shared}


if __name__ == "__main__":
    arch, dim, block_size = int(sys.argv[1].removeprefix("sm_")), int(sys.argv[2]), int(sys.argv[3])
    cmt, packed = (word in sys.argv[4:] for word in ("cmt", "packed"))
    print(json.dumps({kernel: compiled(kernel, arch, dim, block_size, cmt, packed) for kernel in KERNELS}))
