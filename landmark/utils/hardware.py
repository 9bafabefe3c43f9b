"""This machine: processor, cores, GPUs. Loads no torch."""

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """CPU and cores that may be used; where torch is loaded, its threads, its float32 products, and its GPUs."""
    found: dict[str, Any] = {"cpu": _cpu(), "cores": cores()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        found["matmul"] = torch.get_float32_matmul_precision()  # of float32
        if torch.cuda.is_available():
            found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """GPUs of this machine."""
    return len([node for node in Path("/dev").glob("nvidia[0-9]*") if node.name[6:].isdigit()])
