"""The most memory that a phase of the program took."""

import contextlib
import resource
import sys
from pathlib import Path

import torch


def reset_peak_memory() -> None:
    """Forget earlier phases. Outside Linux a process keeps its peak, and it counts from the start."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Most memory in use since `reset_peak_memory`: on the GPU where one is in use, else of this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
