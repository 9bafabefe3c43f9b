"""Whether saved files are those that were saved: their SHA-256 lie beside them, as `sha256sum -c` reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from landmark.utils.errors import UserError
from landmark.utils.files import sha256_file, write_atomic

HASHES = "weights.sha256"  # beside the weights; folders of early versions have none
REMEDY = "delete the folder and train again"
_checked: set[tuple[str, int, int]] = set()  # path, size and time of the files that are as they were saved


def write_hashes(folder: Path, name: str = HASHES, pattern: str = "*.safetensors") -> None:
    """Write the hashes of the folder's files that match the pattern to the file `name` there."""
    lines = [f"{sha256_file(path)}  {path.name}\n" for path in sorted(folder.glob(pattern))]
    write_atomic(folder / name, "".join(lines))


def discard_hashes(folder: Path) -> None:
    """Delete those of weights, before others are written."""
    (folder / HASHES).unlink(missing_ok=True)


def check_hashes(folder: str | Path, name: str = HASHES, remedy: str = REMEDY, needed: Iterable[str] = ()) -> None:
    """Check a folder's files, each once a process. A folder without hashes is one of an early version.

    Args:
        folder: of the files.
        name: of the file of hashes.
        remedy: for the message.
        needed: names of files that must have a hash, if any has.

    Raises UserError, naming the file, where one is missing or altered.
    """
    folder = Path(folder)
    if not (folder / name).is_file():
        return
    lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
    hashes = {Path(file).name: expected for expected, _, file in (line.partition("  ") for line in lines)}
    if "" in hashes:
        raise UserError(f"{folder / name} is damaged, a line names no file: {remedy}")
    if without := [file for file in needed if file not in hashes]:
        raise UserError(f"{folder / name} is damaged, it has no hash of {without[0]}: {remedy}")
    for file, expected in hashes.items():
        check_once(folder / file, lambda path, expected=expected: sha256_file(path) == expected, name, remedy)


def check_once(path: Path, is_whole: Callable[[Path], bool], name: str, remedy: str) -> None:
    """Check a file, unless this process has done so since it was last changed, by its size and time.

    Args:
        path: of the file.
        is_whole: whether its hash is the expected one.
        name: of the expected hash, for the message.
        remedy: for the message.

    Raises UserError where it is not, or where the file cannot be read.
    """
    try:
        status = os.stat(path)
        stamp = str(path.resolve()), status.st_size, status.st_mtime_ns
        if stamp not in _checked and not is_whole(path):
            raise UserError(f"{path} is damaged, its SHA-256 differs from {name}: {remedy}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    _checked.add(stamp)
