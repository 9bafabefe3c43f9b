"""Files that are never seen half-written: atomic writes, JSON that says when it was cut short, hashes."""

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
    """Write a whole file, or leave what was there: temporary name beside it, fsync, rename. Text is UTF-8."""
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
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
def naming(path: str | Path) -> Iterator[None]:
    """Have an error of the system that names no file, as that of a full disk, name this one."""
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
    """Read JSON. Raises UserError naming the file when it is missing, cut short or not JSON."""
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
    """The file of a folder that something on disk names. Raises UserError where the name leads out of the folder."""
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
    except OSError:  # not possible on every file system; the rename itself is still atomic
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
