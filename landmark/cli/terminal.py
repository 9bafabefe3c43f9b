"""The streams of a command, what it logs, and how it ends: one line that says what to do, and an exit code."""

import errno
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from landmark.experiment.config.rows import one_line
from landmark.utils.errors import Stopped, UserError, in_one_line

WAY = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
PLACE = {*WAY, errno.EEXIST, errno.ENOENT}
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
# Packages, by the extra that has them.
EXTRAS = {"transformers": "hf", "peft": "hf", "bm25s": "hf", "gguf": "gguf"}
_PLUGGED = {"hydra", "hydra_plugins", "joblib", "submitit", "optuna"}  # packages whose errors are about what was typed


in_full = False  # HYDRA_FULL_ERROR=1: a traceback for each error


class _Forgiving(io.FileIO):
    """A file that drops what it cannot take."""

    def write(self, data) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


class _Plain(io.TextIOWrapper):
    """A terminal that shows its control characters as text: names in a folder that was downloaded may have any."""

    def write(self, s: str) -> int:
        return super().write(re.sub(r"[^\n\r\t -~\xa0-\U0010ffff]", lambda found: ascii(found[0])[1:-1], s))


def open_streams() -> None:
    """Give closed streams the null device, and show lines at once. What standard error cannot take ends no command."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    if sys.stderr is sys.__stderr__:  # nobody has put another in its place
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Forgiving(2, "w", closefd=False)), encoding="utf-8")
    if sys.stdout is sys.__stdout__ and sys.stdout.isatty():
        sys.stdout = _Plain(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding=sys.stdout.encoding)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


@contextmanager
def reported() -> Iterator[None]:
    """Exit codes: 2 for bad input, 130 for an interrupt, 128 + a signal's number, else 1."""
    try:
        yield
    except Stopped as stop:
        print(stop.message, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.exit(report(error))


def report(error: Exception) -> int:
    """Say what went wrong, in one line if it is no bug. Returns the exit code."""
    try:
        sys.stdout.flush()
    except OSError:  # what waits to be printed cannot be; else Python would report it once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # of `| head`: nobody reads on
        return 128 + signal.SIGPIPE
    message = said(error)
    if message is None or in_full:  # a bug: the traceback begins here, not in Hydra
        traceback.print_exception(error)
    if message is None:
        return 1
    print(f"error: {message}", file=sys.stderr)
    return 2


def said(error: Exception) -> str | None:
    """The line about an error that is no bug: bad input, a missing package, a full disk, a wrong folder."""
    if isinstance(error, (HydraException, OmegaConfBaseException, UserError, yaml.YAMLError)):
        return "".join(each if each.isprintable() else repr(each)[1:-1] for each in one_line(error))
    if isinstance(error.__cause__, OSError) and isinstance(error, ValueError):  # logging could not open its file
        return said(error.__cause__)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<frozen")]
    if isinstance(error, UnicodeDecodeError) and frames and "hydra" in Path(frames[-1].filename).parts:
        return f"a file of settings, in conf or --config-dir, is not UTF-8: save it as UTF-8 ({error})"
    if frames and not isinstance(error, OSError) and _PLUGGED & {*Path(frames[-1].filename).parts[-4:]}:
        return in_one_line(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"this needs the package {error.name}: pip install 'landmark[{EXTRAS[error.name]}]'"
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in PLACE and frames[-1].name in ("mkdir", "makedirs"):  # others of its kind are bugs
        return f"{where}{error.strerror}: no folder can be made there, name another output= or data.cache="
    if error.errno in WAY and error.filename:  # what is on the disk, not this program, has put it there
        return f"{error.filename2 or error.filename}: {error.strerror}: move it away, or name another output="
    if error.errno in STORAGE:
        hint = "make it readable and writable" if isinstance(error, PermissionError) else "make room"
        return f"{where}{error.strerror}: {hint}, or name another output= or data.cache=; what is done is kept"
    return None
