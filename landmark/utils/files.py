"""Files that are whole or named: atomic writes, checked JSON, hashes beside weights, leftovers of killed processes."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError

Keys = Mapping[str, type | tuple[type, ...]]
HASHES = "weights.sha256"  # beside the weights that are saved here
_checked: set[tuple[str, int, int]] = set()  # path, size and time of the files that are as they were saved
_JSON_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write a whole file, or leave the old one: temporary file beside it, fsync, rename. Text is UTF-8."""
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = _temporary(path)
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


def _temporary(path: Path) -> tuple[int, str]:
    """A new file beside another, locked so that nobody takes it for a leftover (`delete_leftovers`)."""
    while True:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with suppress(OSError):  # of file systems that have no locks, where nothing is taken for one
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)


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


REMEDY = "delete it to make it anew"


def read_json(path: str | Path, keys: Keys | None = None, remedy: str = REMEDY) -> Any:
    """Read JSON.

    Args:
        path: of the file.
        keys: those that an object must have, with the types of their values; None: it may be any value.
        remedy: for the message.

    Raises UserError with the file's name if it is missing, cut short or not JSON, and the key's that is missing or has
    another type.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON, cut short or altered ({error}): {remedy}") from None
    if keys is not None:
        check_keys(value, keys, str(path), remedy)
    return value


def check_keys(value: Any, keys: Keys, where: str, remedy: str = REMEDY) -> None:
    """Raise UserError where a value is no object that has these keys with values of these types.

    Args:
        value: of JSON.
        keys: with the types of their values.
        where: file, and key in it, for the message.
        remedy: for the message.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where} is {_shown(value)}, not an object with {', '.join(keys) or 'keys'}: {remedy}")
    for key, kind in keys.items():
        if key not in value:
            raise UserError(f"{where} is not whole, {key} is missing: {remedy}")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value[key], kind) or (isinstance(value[key], bool) and bool not in kinds):
            wanted = " or ".join(_JSON_NAMES.get(each, each.__name__) for each in kinds)
            raise UserError(f"{where}: {key} is {_shown(value[key])}, not {wanted}: {remedy}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


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


def write_hashes(folder: Path, name: str = HASHES, pattern: str = "*.safetensors") -> None:
    """Write the hashes of the folder's files that match the pattern to the file `name` there."""
    lines = [f"{sha256_file(path)}  {path.name}\n" for path in sorted(folder.glob(pattern))]
    write_atomic(folder / name, "".join(lines))


def discard_hashes(folder: Path) -> None:
    """Delete those of weights, before others are written."""
    (folder / HASHES).unlink(missing_ok=True)


def check_hashes(
    folder: str | Path,
    name: str = HASHES,
    remedy: str = "delete the folder and train again",
    needed: Iterable[str] = (),
) -> None:
    """Check a folder's files, each once a process until its size or time changes. One without hashes passes.

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
        path = folder / file
        try:
            status = os.stat(path)
            stamp = str(path.resolve()), status.st_size, status.st_mtime_ns
            if stamp not in _checked and sha256_file(path) != expected:
                raise UserError(f"{path} is damaged, its SHA-256 differs from {name}: {remedy}")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
        _checked.add(stamp)


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


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Hold the lock of a file or a folder, which the system releases when its process dies.

    Yields False where another process holds it, or no lock can be had here.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def delete_leftovers(paths: Iterable[Path]) -> None:
    """Delete the files and folders that nobody has locked; those that cannot be deleted stay."""
    for path in paths:
        with suppress(OSError), locked(path) as is_nobodys:
            if not is_nobodys:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
