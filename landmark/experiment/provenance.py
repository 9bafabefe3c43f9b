"""Where a result comes from: commit, versions, hardware, command, time."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from landmark.config.command_line import typed
from landmark.utils.locations import ROOT

PACKAGES = ("landmark", "torch", "triton", "lightning", "numpy", "hydra-core", "tiktoken", "datasets")


def provenance() -> dict[str, Any]:
    """Commit (with + where tracked files were changed), versions, hardware, command line, UTC time."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "command": _command(),
        "time": _now(),
    }


def started() -> dict[str, Any]:
    """Who is at work: machine, process, command line, UTC time."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "command": _command(),
        "time": _now(),
    }


@cache
def commit() -> str | None:
    """The commit of this source tree, or None outside a repository."""
    head = _git("rev-parse", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def hardware() -> dict[str, Any]:
    """CPU, cores that may be used, and GPUs where torch is loaded and sees any."""
    found: dict[str, Any] = {"cpu": _cpu(), "cores": cores()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
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


def _command() -> str:
    return shlex.join(typed())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
