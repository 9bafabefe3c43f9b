"""The lines of a run: JSON, one a line, each on disk before the next is measured."""

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError
from landmark.utils.hardware import hardware
from landmark.utils.source_tree import commit

PACKAGES = ("torch", "triton", "numpy", "attn-gym")
Line = dict[str, Any]


class Journal:
    """A file of lines, which is only ever added to.

    done: names of the items that ended well in it, or for which another run need not be made.
    """

    def __init__(self, path: Path, resume: bool):
        """Open the file. resume: go on in one that is there. Raises UserError where it is there, or is no such file."""
        before = lines_of(path)
        if before and not resume:
            raise UserError(f"{path} has lines already: pass --resume to go on in it, or --out for another file")
        ends = {line["item"]: line["status"] for line in before if line.get("kind") == "item"}
        self.done = {name for name, status in ends.items() if status == "ok"}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if before and not path.read_text(encoding="utf-8").endswith("\n"):
            self._file.write("\n")  # a line that was cut off stays, alone

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line to the file and to the standard output."""
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        self._file.write(text + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        print(text, flush=True)

    def close(self) -> None:
        self._file.close()


def lines_of(path: Path) -> list[Line]:
    """The whole lines of a file; none where there is no file."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # a run was killed while it wrote
            continue
    return lines


def header(words: Sequence[str], minutes: float) -> Line:
    """The first line of a call: command, commit, hardware, versions, UTC time."""
    return {
        "kind": "call",
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *words]),
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": minutes,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
