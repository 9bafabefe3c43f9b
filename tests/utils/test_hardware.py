import ctypes
import subprocess
import sys

import pytest
import torch

from landmark.utils import hardware
from landmark.utils.flops import peak_flops

LINUX = sys.platform.startswith("linux")
MEASURED = "from landmark.utils.hardware import peak_memory_bytes; print(peak_memory_bytes())"
PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * 500_000_000
subprocess.run([sys.executable, "-c", {MEASURED!r}], check=True)
{MEASURED}
"""


PAGES = """
import resource, sys, torch
from landmark.utils.hardware import keep_memory, return_memory
if sys.argv[1:]:
    keep_memory()
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(1 << 25), torch.zeros(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
return_memory()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="is of glibc")
def test_memory_that_is_kept_is_not_mapped_again_and_can_be_returned():
    """Page faults of 200 MB of tensors that come once more, and what then goes back to the system."""
    (kept, returned), (usual, _) = (
        map(
            int,
            subprocess.run([sys.executable, "-c", PAGES, *given], stdout=subprocess.PIPE, check=True).stdout.split(),
        )
        for given in (["keep"], [])
    )
    assert kept < 100 < usual
    assert returned > 150e6


@pytest.mark.skipif(not LINUX, reason="counts the parent elsewhere")
def test_the_memory_of_the_parent_does_not_count():
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, check=True)
    child, parent = map(int, done.stdout.split())
    assert child < parent - 250e6


PHASES = """
import torch
from landmark.utils.hardware import peak_memory_bytes, reset_peak_memory
reset_peak_memory()
before = peak_memory_bytes()
torch.ones(30_000_000)
assert peak_memory_bytes() > before + 100e6
reset_peak_memory()
assert peak_memory_bytes() < before + 100e6
"""


@pytest.mark.skipif(not LINUX, reason="cannot be reset elsewhere")
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPU's memory")
def test_an_earlier_phase_does_not_count():
    """In a process of its own: one that has trained keeps freed memory."""
    subprocess.run([sys.executable, "-c", PHASES], check=True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("cpu", None),
    ],
)
def test_peak_by_name(name, peak):
    assert peak_flops(name, "bf16-mixed") == peak
    assert peak_flops(name, "32-true") is None


@pytest.mark.skipif(not LINUX, reason="Linux says how busy cores are")
@pytest.mark.parametrize(("others", "threads"), [(0.2, 4), (1.2, 3), (2.7, 1), (90.0, 1)])
def test_torch_leaves_the_cores_that_others_keep_busy(others, threads, monkeypatch):
    """others: cores that other programs had in the ten seconds since the start."""
    now = hardware.time.monotonic()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    monkeypatch.setattr(hardware, "_started", (now - 10, hardware._seconds_of_others() - 10 * others))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    advice = hardware.leave_busy_cores(advise=True)
    assert not taken
    assert (advice is None) == (threads == 4)
    said = hardware.leave_busy_cores()
    expected = threads
    assert taken == ([expected] if expected < 4 else [])
    assert (said is not None) == bool(taken)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert hardware.leave_busy_cores() is None
    assert len(taken) <= 1
