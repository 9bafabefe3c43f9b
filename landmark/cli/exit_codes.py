"""Errors at the end of a job: one line that says what to do, and an exit code."""

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from landmark.utils.errors import Stopped, UserError

PLACE = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}


@contextmanager
def reported() -> Iterator[None]:
    """Exit codes: 2 and one line for bad input, 130 for an interrupt, 128 + its number for a signal, else 1."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except Stopped as stop:
        print(stop.message, file=sys.stderr)
        raise
    except OSError as error:
        fail_storage(error)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except Exception:  # a bug: the traceback begins here, not in Hydra
        traceback.print_exc()
        sys.exit(1)


def fail(message: str) -> NoReturn:
    """Print one line, exit with code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def fail_storage(error: OSError) -> NoReturn:
    """Exit with code 2 and one line where a disk is full, read-only or failing, or a folder cannot be made; with a
    traceback and 1 otherwise.
    """
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in PLACE and _made_by_mkdir(error):
        fail(f"{where}{error.strerror}: no folder can be made there, name another output= or data.cache=")
    if error.errno not in STORAGE:
        traceback.print_exc()
        sys.exit(1)
    fail(f"{where}{error.strerror}: make room, or name another output= or data.cache=; what is done is kept")


def _made_by_mkdir(error: OSError) -> bool:
    """Whether a folder could not be made; others of its kind are bugs, which keep their traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].name in ("mkdir", "makedirs")
