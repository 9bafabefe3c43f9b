"""Errors at the end of a job: one line that says what to do, and an exit code."""

import errno
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.launchers import is_lost
from landmark.cli.streams import drop_output
from landmark.config.messages import one_line
from landmark.utils.errors import Stopped, UserError

PLACE = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
# Packages, by the extra that has them.
EXTRAS = {"transformers": "hf", "peft": "hf", "bm25s": "hf", "gguf": "gguf", "optuna": "optuna"}
_HYDRA = Path(hydra.__file__).parent


@contextmanager
def reported() -> Iterator[None]:
    """Exit codes: 2 and one line for bad input, 130 for an interrupt, 128 + its number for a signal, else 1."""
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


@contextmanager
def raised() -> Iterator[None]:
    """The same for a job of a sweep, whose errors go on to the sweep after they were reported."""
    try:
        yield
    except BrokenPipeError as error:
        sys.exit(report(error))
    except Exception as error:
        report(error)
        raise


def report(error: Exception) -> int:
    """Say what went wrong, in one line if it is no bug. Returns the exit code."""
    drop_output()
    if isinstance(error, BrokenPipeError):  # of `| head`: nobody reads on
        return 128 + signal.SIGPIPE
    if (message := said(error)) is None:  # a bug: the traceback begins here, not in Hydra
        traceback.print_exception(error)
        return 1
    print(f"error: {message}", file=sys.stderr)
    return 2


def said(error: Exception) -> str | None:
    """The line about an error that is no bug: bad input, a missing package, a lost job, a full disk, a wrong folder."""
    if isinstance(error, (HydraException, OmegaConfBaseException, UserError)) or is_lost(error):
        return " ".join(one_line(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (TypeError, ValueError)) and frames and Path(frames[-1].filename).is_relative_to(_HYDRA):
        return f"Hydra cannot use these words: {error}; a group takes a name, like model=landmark"
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"this needs the package {error.name}: pip install 'landmark[{EXTRAS[error.name]}]'"
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in PLACE and frames[-1].name in ("mkdir", "makedirs"):  # others of its kind are bugs
        return f"{where}{error.strerror}: no folder can be made there, name another output= or data.cache="
    if error.errno in STORAGE:
        return f"{where}{error.strerror}: make room, or name another output= or data.cache=; what is done is kept"
    return None


def fail(message: str) -> NoReturn:
    """Print one line, exit with code 2."""
    sys.exit(report(UserError(message)))
