"""Freed memory is used again: no page faults for the second tensor of the same size."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from landmark.utils.allocator import reuse_freed_memory

if sys.argv[1] == "reuse" and not reuse_freed_memory():
    sys.exit(77)
for _ in range(3):
    torch.ones(24 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(24 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, way], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("the C library is not glibc")
    return int(done.stdout)


def test_pages_of_a_freed_tensor_are_not_fetched_again() -> None:
    assert faults("reuse") < 50
    assert faults("default") > 200  # 480 MB in pages of 4 KiB, or of 2 MiB where the system has huge ones
