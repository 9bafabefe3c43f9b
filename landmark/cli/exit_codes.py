"""Errors at the end of a job: one line that says what to do, and an exit code."""

import errno
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from landmark.cli.launchers import is_lost
from landmark.cli.streams import drop_output
from landmark.config.messages import one_line
from landmark.utils.errors import Stopped, UserError

PLACE = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}


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
    """The line about an error that is no bug: bad input, a lost job, a full disk, a folder that cannot be made."""
    if isinstance(error, (HydraException, OmegaConfBaseException, UserError)) or is_lost(error):
        return " ".join(one_line(error).split())
    if isinstance(error, ValueError) and _frames(error)[-1:] == [("utils.py", "_run_hydra")]:  # of its flags
        return str(error)
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in PLACE and _made_by_mkdir(error):
        return f"{where}{error.strerror}: no folder can be made there, name another output= or data.cache="
    if error.errno in STORAGE:
        return f"{where}{error.strerror}: make room, or name another output= or data.cache=; what is done is kept"
    return None


def fail(message: str) -> NoReturn:
    """Print one line, exit with code 2."""
    sys.exit(report(UserError(message)))


def _made_by_mkdir(error: OSError) -> bool:
    """Whether a folder could not be made; others of its kind are bugs, which keep their traceback."""
    return any(name in ("mkdir", "makedirs") for _, name in _frames(error)[-1:])


def _frames(error: Exception) -> list[tuple[str, str]]:
    """The file and the function of each frame, that of the error last."""
    return [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
