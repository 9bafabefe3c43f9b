"""Atomic writes, JSON with an error for damaged files, hashes."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write a whole file, or leave the old one: temporary file beside it, fsync, rename. Text is UTF-8."""
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with name_in_errors(path), os.fdopen(descriptor, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def name_in_errors(path: str | Path) -> Iterator[None]:
    """Add this file's name to a system error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically, keys in their order, indent 1. Raises ValueError on NaN or infinity."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read JSON. Raises UserError with the file's name if it is missing, cut short or not JSON."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} is not valid JSON, cut short or altered ({error}): delete it to make it anew"
        ) from None


def inside(folder: str | Path, name: object) -> Path:
    """The path of a file that is named on disk. Raises UserError if it is not inside the folder."""
    folder = Path(folder)
    if not isinstance(name, str) or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} names the file {name!r}, which is not in it: nothing is read from there")
    return folder / name


def sha256_file(path: str | Path, chunk_bytes: int = 1 << 20) -> str:
    """Hex SHA-256 of a file's content, read `chunk_bytes` at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename inside it survives a power cut."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # some file systems do not allow it; the rename is still atomic
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
