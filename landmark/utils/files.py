"""Files written whole or not at all, and opened (`open_written`) if they have the size and hash that they had."""

import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from landmark.utils.errors import UserError

Keys = Mapping[str, type | tuple[type, ...]]
HASHES = "weights.sha256"  # beside the weights that are saved here
REMEDY, RETRAIN = "delete it to make it anew", "delete the folder and train again"
MOST_JSON = 1 << 28  # bytes
_checked: set[tuple[Any, ...]] = set()  # path, size, times and hash of the files that are as they were saved
_JSON_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write a whole file, or leave the old one. Text is UTF-8."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[io.BufferedRandom]:
    """A file to write and read, flushed and renamed to `path` at the end; after an error `path` stays as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = _temporary(path)
    try:
        with name_in_errors(path), os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.umask(mask := os.umask(0))  # there is no other way to ask for it
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let what was renamed in a folder survive a power cut, on file systems that allow it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    """Add a file's name to a system error that names none, as of a full disk; safetensors has it as words. Raises
    UserError: its folder is gone.
    """
    try:
        try:
            yield
        except Exception as error:
            if (system_error := re.search(r"\(os error (\d+)\)$", str(error))) is None:
                raise
            raise OSError(int(system_error[1]), os.strerror(int(system_error[1]))) from error
    except FileNotFoundError as error:
        raise UserError(
            f"{path} cannot be written, its folder was moved or deleted: put it back, the same command goes on"
        ) from error
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically, keys in their order, indent 1. Raises ValueError on NaN or infinity."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def open_written(
    path: str | Path, remedy: str = REMEDY, *, size: int | None = None, sha256: str | None = None, named: str = ""
) -> BinaryIO:
    """Open a file that this program wrote. sha256: computed again if the size or time changes. named: what says the
    hash. Raises UserError where it is missing, cannot be read, is a folder, a pipe or a device, or is not as it was
    written.
    """
    path = Path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for somebody who writes
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {remedy}") from None
    except OSError as error:
        hint = "make it readable" if isinstance(error, PermissionError) else remedy
        raise UserError(f"{path} cannot be read ({error.strerror}): {hint}") from None
    status, fault = os.fstat(descriptor), ""
    if not stat.S_ISREG(status.st_mode):
        fault = f"no file, but a {_kind(status.st_mode)}"
    elif size is not None and status.st_size != size:
        fault = f"{status.st_size} bytes long, not {size}"
    if fault:
        os.close(descriptor)
        raise UserError(f"{path} is {fault}: {remedy}")
    file = os.fdopen(descriptor, "rb")
    stamp = str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, sha256
    if sha256 is not None and stamp not in _checked:
        try:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise UserError(f"{path} is damaged, its SHA-256 differs from {named}: {remedy}")
            file.seek(0)
        except (OSError, UserError):
            file.close()
            raise
        _checked.add(stamp)
    return file


def check_named(model: str) -> None:
    """Raise UserError for the path of a model that is nowhere; other names may be on the hub."""
    if (model.startswith(("/", ".", "~")) or model.endswith(".gguf")) and not Path(model).exists():
        raise UserError(f"model.name={model}: there is no such folder or file")


def check_files(folder: str | Path) -> None:
    """Raise UserError where a folder of somebody else's has a pipe or a device, for which a library would wait, or a
    file that may not be read, which libraries say is not there.
    """
    for path in sorted(Path(folder).iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is no file, but a {_kind(path.stat().st_mode)}: nothing is read from there")
        if path.exists() and not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: make it readable")


def _kind(mode: int) -> str:
    return "folder" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device"


def read_json(path: str | Path, keys: Keys | None = None, remedy: str = REMEDY) -> Any:
    """Read JSON that this program wrote. keys: as for `check_keys`; None: any value. Raises UserError as
    `open_written`, where it is not whole, finite JSON, and, naming the key, where one is missing or has another type.
    """
    with open_written(path, remedy) as file:
        content = file.read(MOST_JSON + 1)
    try:
        if len(content) > MOST_JSON:
            raise ValueError(f"more than {MOST_JSON:,} bytes")
        value = json.loads(content.decode(), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON, cut short or altered ({error}): {remedy}") from None
    if keys is not None:
        check_keys(value, keys, str(path), remedy)
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value with the SHA-256 of all its other keys, as `read_sealed` expects it. Raises ValueError on NaN."""
    return {**value, "sha256": _seal(value)}


def read_sealed(path: str | Path, keys: Keys, remedy: str = REMEDY) -> dict[str, Any]:
    """Read JSON that was `sealed`. Raises UserError as `read_json`, and where a key or a value is another."""
    value = read_json(path, {**keys, "sha256": str}, remedy)
    if value["sha256"] != _seal(value):
        raise UserError(f"{path} was altered: its sha256 is another: {remedy}")
    return value


def _seal(value: Mapping[str, Any]) -> str:
    parts = json.dumps({key: part for key, part in value.items() if key != "sha256"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(json.dumps(json.loads(parts), sort_keys=True).encode()).hexdigest()


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def check_keys(value: Any, keys: Keys, where: str, remedy: str = REMEDY) -> None:
    """Raise UserError where JSON is no object with values of these types. where: file and key, for the message."""
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


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashes(folder: Path, files: Iterable[str], name: str = HASHES) -> None:
    """Write the hashes of the folder's files into the file `name` there, as `sha256sum -c` reads them."""
    write_atomic(folder / name, "".join(f"{sha256_file(folder / file)}  {file}\n" for file in sorted(files)))


def read_hashes(folder: str | Path, needed: Iterable[str], name: str = HASHES, remedy: str = RETRAIN) -> dict[str, str]:
    """The hashes of a folder's files, `needed` among them. Raises UserError where one is missing or altered."""
    folder = Path(folder)
    with open_written(folder / name, remedy) as file:
        text = file.read(MOST_JSON).decode(errors="replace")
    if text and not text.endswith("\n"):
        raise UserError(f"{folder / name} is damaged, its last line is cut: {remedy}")
    lines = text.splitlines()
    hashes = {Path(file).name: expected for expected, _, file in (line.partition("  ") for line in lines)}
    for file, expected in hashes.items():
        if not re.fullmatch("[0-9a-f]{64}", expected) or not file:
            raise UserError(f"{folder / name} is damaged, a line has no hash and file: {remedy}")
    if without := [file for file in needed if file not in hashes]:
        raise UserError(f"{folder / name} is damaged, it has no hash of {without[0]}: {remedy}")
    for file, expected in hashes.items():
        _check_size(folder / file, remedy)
        open_written(folder / file, remedy, sha256=expected, named=name).close()
    return hashes


def _check_size(path: Path, remedy: str) -> None:
    """Raise UserError for a file that has grown: its hash would take long. Safetensors say how long they are."""
    if path.suffix == ".safetensors":
        with open_written(path, remedy) as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, MOST_JSON) else b""
        try:
            entries = json.loads(header).items()
            ends = [item["data_offsets"][1] for key, item in entries if key != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return  # what is damaged so has another hash
        if size > wanted:
            raise UserError(f"{path} is damaged, {size} bytes long, not {wanted}: {remedy}")
    elif path.suffix == ".json" and path.is_file() and path.stat().st_size > MOST_JSON:
        raise UserError(f"{path} has more than {MOST_JSON:,} bytes: {remedy}")


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Hold the lock of a file or a folder until the process dies. Yields False where it is held, or cannot be had."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def held_lock(path: Path, wait: Callable[[], object]) -> Iterator[None]:
    """Hold a lock, which the system releases when a process dies. wait: called where another process has it."""
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        wait()
        held = lock.acquire()
    with held:
        yield


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
