"""What the fused kernels take on GPUs that need not be there: `python -m benchmarks.ahead_of_time`.

Each kernel is compiled with its default tiles. A row says how many registers, bytes of stack (spilled registers) and of
shared memory it takes, and how many instructions a warp executes for 64 keys (backward_keys, and backward, which does
the work of both others: for 64 queries) where no mask is needed, and at the edge of a window.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.compiled_kernels import GPUS, Compiled, with_tiles
from landmark.attention.fused import tuning
from landmark.attention.fused.tuning import KERNELS, Tiles
from landmark.utils.data_frames import aligned, csv_text
from landmark.utils.files import write_atomic

RESULTS = Path(__file__).parent / "results"
NAME = "ahead-of-time"


@dataclass(frozen=True)
class Case:
    """A shape on a GPU. target: compute capability. block: ℓ."""

    target: int
    dim: int = 128
    block: int = 63
    dtype: torch.dtype = torch.bfloat16
    cmt: bool = False


CASES = (
    *(Case(90), Case(90, 64), Case(90, block=50), Case(90, cmt=True)),
    *(Case(90, block=127), Case(90, 64, block=127), Case(90, 256)),
    *(Case(80), Case(80, 64), Case(86), Case(86, 256), Case(120)),
)


def main(words: Sequence[str]) -> int:
    """Compile, print the table, and write it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead_of_time", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one shape alone, to check that everything works")
    arguments = parser.parse_args(words)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: under TRITON_INTERPRET=1 nothing can be compiled: unset it", file=sys.stderr)
        return 1
    rows = []
    for row in measured(CASES[:1] if arguments.quick else CASES):
        rows.append(row)
        print(*row.values(), sep="  ", flush=True)
    origin = report.source(shlex.join(["python", "-m", "benchmarks.ahead_of_time", *words]))
    for kind, text in (("csv", csv_text([each | origin for each in rows])), ("md", as_markdown(rows, origin))):
        write_atomic(arguments.out / f"{NAME}.{kind}", text)
    return 0


def measured(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row for each kernel in each case."""
    for case in cases:
        for kernel in KERNELS:
            size = case.dtype.itemsize
            shape = {"block_size": case.block, "dim": case.dim, "dtype": case.dtype, "arch": case.target}
            for tiles in tuning.choices(kernel, case.block, case.dim, size, GPUS[case.target], case.cmt)[:1]:
                yield row(case, kernel, tiles, with_tiles(kernel, tiles, **shape, cmt=case.cmt, packed=False))


def row(case: Case, kernel: str, tiles: Tiles, made: Compiled) -> dict[str, Any]:
    """Values by column."""
    first = 1 if case.cmt and kernel == "forward" else 0  # the loop before it sums the controlled landmarks
    plain, edge = made.instructions[first : first + 2]
    if tuning.is_over_keys(kernel):
        plain, edge = edge, plain
    keys = tiles.segment * tiles.group
    at_once = tiles.queries if tuning.is_over_keys(kernel) else keys
    return {
        "GPU": f"sm_{case.target}",
        "type": str(case.dtype).removeprefix("torch."),
        "d": case.dim,
        "W": case.block + 1,
        "CMT": "yes" if case.cmt else "no",
        "kernel": kernel,
        "queries": tiles.queries,
        "keys": keys,
        "warps": tiles.warps,
        "stages": tiles.stages,
        "registers": made.registers,
        "spilled bytes": made.stack,
        "shared bytes": made.shared,
        "of at most": made.allowed,
        "instructions": round(plain * 64 / at_once),
        "at an edge": round(edge * 64 / at_once),
    }


def as_markdown(rows: Sequence[dict[str, Any]], origin: dict[str, str]) -> str:
    cells = [list(map(str, each.values())) for each in rows]
    legend = (
        "Default tiles; compiled without a GPU. keys: of a tile, first where no mask is needed. instructions: of a "
        "warp for 64 keys (backward, backward_keys: 64 queries), counted in the machine code of the innermost loop."
    )
    where = f"Made at commit {origin['commit'][:10]} ({origin['versions']}) by `{origin['command']}`."
    return "\n".join([aligned(rows[0], cells, len(rows[0]), "pipe"), "", legend, where]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
