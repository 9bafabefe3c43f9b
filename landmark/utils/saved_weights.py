"""Whether saved weights are those that were saved: their SHA-256 lies beside them, as `sha256sum -c` reads it."""

from __future__ import annotations

import os
from pathlib import Path

from landmark.utils.errors import UserError
from landmark.utils.files import sha256_file, write_atomic

HASHES = "weights.sha256"  # beside the weights; folders of early versions have none
REMEDY = "delete the folder and train again"
_checked: set[tuple[str, int, int]] = set()  # path, size and time of the files that are as they were saved


def write_hashes(folder: Path) -> None:
    """Write the hashes of all *.safetensors in a folder."""
    lines = [f"{sha256_file(path)}  {path.name}\n" for path in sorted(folder.glob("*.safetensors"))]
    write_atomic(folder / HASHES, "".join(lines))


def discard_hashes(folder: Path) -> None:
    """Delete them, before other weights are written."""
    (folder / HASHES).unlink(missing_ok=True)


def check_hashes(folder: str | Path) -> None:
    """Raise UserError, naming the file, where weights are missing or altered. A process reads each file once."""
    folder = Path(folder)
    if not (folder / HASHES).is_file():
        return
    for line in (folder / HASHES).read_text(encoding="utf-8", errors="replace").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / Path(name).name
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from None
        stamp = str(path.resolve()), status.st_size, status.st_mtime_ns
        if stamp in _checked:
            continue
        if sha256_file(path) != expected:
            raise UserError(f"{path} is damaged, its SHA-256 differs from {HASHES}: {REMEDY}")
        _checked.add(stamp)
