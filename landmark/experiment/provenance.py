"""Where a result comes from: commit, versions, hardware, command, time."""

import os
import platform
import shlex
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from landmark.config.command_line import typed_words
from landmark.utils.hardware import hardware
from landmark.utils.source_tree import commit

PACKAGES = ("landmark", "torch", "triton", "lightning", "numpy", "hydra-core", "tiktoken", "datasets")


def provenance() -> dict[str, Any]:
    """Commit, versions, hardware, command line, UTC time."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "command": shlex.join(typed_words()),
        "time": now(),
    }


def process() -> dict[str, Any]:
    """The process at work: machine, process id, command line, UTC time."""
    return {"host": platform.node(), "pid": os.getpid(), "command": shlex.join(typed_words()), "time": now()}


def now() -> str:
    """UTC time, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
