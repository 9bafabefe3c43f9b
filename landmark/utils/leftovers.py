"""Files and folders of processes that were killed while they wrote: a temporary is locked by the process at work on it.

The system releases a lock when its process dies, so a temporary without one belongs to nobody.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Hold the lock of a file or a folder. Yields False where another process holds it, or no lock can be had here."""
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
