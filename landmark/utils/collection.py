"""Python's search for objects that nobody uses, put off while a program starts."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No search within. While libraries are imported nearly all objects stay, and each search looks at all of them.

    Later ones leave out the objects that are there at the end of the first time, until the program ends: not at each
    end, or what is no longer used by then would stay for ever.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                atexit.register(gc.unfreeze)  # or a library tells that they were never freed
            gc.enable()
