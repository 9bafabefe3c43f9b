"""Peak memory of a phase of the program."""

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch


def reset_peak_memory() -> None:
    """Start a phase. The peak of a process can be reset only on Linux; elsewhere it counts from the process's start."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Peak memory since `reset_peak_memory`: of the GPU if one is in use, else of this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    """On Linux from /proc: getrusage would include the parent, whose maximum a new process inherits."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
