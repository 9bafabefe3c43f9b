"""How a job of run.py ends where it does not end well: one line that says what to do, and an exit code."""

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from landmark.utils.errors import Stopped, UserError

STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}


@contextmanager
def reported() -> Iterator[None]:
    """Bad input ends in one line and exit code 2; an interrupt in 130; a signal, after its checkpoint, in 128 + it."""
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
    except Exception:  # a mistake of this program: the traceback begins here, not in Hydra
        traceback.print_exc()
        sys.exit(1)


def fail(message: str) -> NoReturn:
    """Print one line, exit with code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def fail_storage(error: OSError) -> NoReturn:
    """One line and exit code 2 where a disk is full, read-only or failing; any other error of the system is raised."""
    if error.errno not in STORAGE:
        traceback.print_exc()
        sys.exit(1)
    where = f"{error.filename}: " if error.filename else ""
    fail(f"{where}{error.strerror}: make room, or name another output= or data.cache=; what is done is kept")
