"""The table of what compiled kernels take: instructions of a loop are counted in machine code, not guessed."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.compiled_kernels import _loops

ROOT = Path(__file__).parents[2]
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;    /* 0x00000a0000017a02 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R14, R4 ;
        /*0040*/                   NOP ;
        /*0050*/              @P0  BRA 0x20 ;
        /*0060*/                   ISETP.GE.AND P1, PT, R2, R3, PT ;
        /*0070*/              @!P1 BRA 0x10 ;
        /*0080*/                   FADD R4, R4, R5 ;
        /*0090*/              @P2  BRA 0x80 ;
        /*00a0*/                   EXIT ;
"""


def test_only_innermost_loops_with_matrix_products_are_counted():
    assert list(_loops(SASS)) == [3]


def test_compiles_without_a_gpu_and_writes_a_row_for_each_kernel(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.ahead_of_time", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "ahead-of-time.csv").read_text().splitlines()))
    assert [row["kernel"] for row in rows] == ["forward", "backward", "backward_queries", "backward_keys"]
    for row in rows:
        assert 0 < int(row["instructions"]) < int(row["at an edge"]) < 2000
        assert int(row["spilled bytes"]) <= (256 if row["kernel"] == "backward" else 0)
        assert int(row["shared bytes"]) <= int(row["of at most"])
        assert row["command"].endswith("benchmarks.ahead_of_time --quick --out " + str(tmp_path))
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "error: under TRITON_INTERPRET=1 nothing can be compiled: unset it\n")
