"""This machine: processor, cores, GPUs, and the peak memory of a phase of the program. Loading it loads no torch."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import resource
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError

AS_EXACT = 2.0  # times the error of PyTorch's usual library for products of float32
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2  # settings of glibc's mallopt
_PAD = 1 << 26  # bytes by which its heap grows at a time


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


def _seconds_of_others() -> float:
    """Processor seconds that other programs have had on the cores of this one, since the machine started; 0 less those
    of this program, and of processes that it started and that ended, where the system, as all but Linux, does not say.
    """
    ticks, own = 0, sum(os.times()[:4])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        for name, *times in (line.split() for line in Path("/proc/stat").read_text().splitlines()):
            if name in names:
                user, nice, system, _, _, *interrupts = map(int, times[:7])
                ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK") - own


_started = time.monotonic(), _seconds_of_others()


def leave_busy_cores(advise: bool = False) -> str | None:
    """Let torch compute on as many cores as others have left free since this program started, and return a line about
    it; None: all are free, or `OMP_NUM_THREADS` says how many. Threads that share a core with another program wait for
    each other: with one of two cores busy, two threads read a book, or train, six times slower than one.

    advise: leave torch as it is, because the number of threads decides the last bits of a result.
    """
    torch, passed = sys.modules["torch"], time.monotonic() - _started[0]
    if "OMP_NUM_THREADS" in os.environ or passed < 1:
        return None
    busy = (_seconds_of_others() - _started[1]) / passed
    if (free := max(1, cores() - round(busy))) >= torch.get_num_threads():
        return None
    said = f"other programs keep {busy:.1f} of {cores()} cores busy:"
    if advise:
        return f"{said} trainer.threads={free} may be several times as fast"
    torch.set_num_threads(free)
    return f"{said} reading with trainer.threads={free}"


def count_gpus() -> int:
    """GPUs of this machine."""
    return len([node for node in Path("/dev").glob("nvidia[0-9]*") if node.name[6:].isdigit()])


@cache
def has_units(device: str) -> bool:
    """Whether a device is a CPU that multiplies matrices in bfloat16, if oneDNN may (`ONEDNN_MAX_CPU_ISA`)."""
    import torch

    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device == "cpu" and units and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def reset_peak_memory() -> None:
    """Start a phase. The peak of a process can be reset only on Linux; elsewhere it counts from the process's start."""
    if (cuda := _cuda_in_use()) is not None:
        cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Peak memory since `reset_peak_memory`: of the GPU if one is in use, else of this process."""
    if (cuda := _cuda_in_use()) is not None:
        return cuda.max_memory_allocated()
    # On Linux from /proc: getrusage would include the parent, whose maximum a new process inherits.
    with contextlib.suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes(device: Any) -> int:
    """Free memory: of a GPU (`torch.device`), else of this machine, or of the container that the process is in."""
    if device.type == "cuda":
        return sys.modules["torch"].cuda.mem_get_info(device)[0]
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):  # what files fill is free too
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = [int(found[1]) * 1024] if found else free
    with contextlib.suppress(OSError, ValueError):  # "max": the container has no limit
        most, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free.append(max(0, most - used))
    return min(free)


@cache
def keep_memory() -> None:
    """Let the C library keep freed memory for the next tensors. Else each large one is mapped, zeroed and returned: of
    a step of Gemma 3 270M on a CPU that was nearly half of the time. Where there is no glibc nothing changes.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for setting, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD)):
            mallopt(setting, value)


def return_memory() -> None:
    """Give the system back what nothing uses, in which there may be gigabytes of a training that has ended."""
    gc.collect()  # what a trainer, its callbacks and its optimizer refer to in turn
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def set_up_cpu() -> None:
    """Have torch multiply float32 by oneDNN where that is exact, and keep freed memory."""
    sys.modules["torch"].set_float32_matmul_precision("medium" if _is_onednn_exact() else "highest")
    keep_memory()


@cache
def _is_onednn_exact() -> bool:
    """Whether "medium" precision, with which PyTorch multiplies by oneDNN, rounds no more than float32 does. Some
    processors then take half of the time; others, with instructions for bfloat16, round.
    """
    torch = sys.modules["torch"]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, *shape, generator=generator) for shape in ((102, 128), (128, 510)))
    errors = {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        errors[precision] = float(((a @ b).double() - a.double() @ b.double()).abs().max())
    return errors["medium"] <= AS_EXACT * errors["highest"]


def device_of(accelerator: str) -> str:
    """Where a model reads, by `trainer.accelerator`. Raises UserError where a GPU is asked for and there is none."""
    if accelerator == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if accelerator in ("gpu", "cuda"):
        raise UserError(f"trainer.accelerator={accelerator}: no GPU was found, use trainer=cpu")
    return "cpu"


def _cuda_in_use() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
