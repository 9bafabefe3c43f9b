"""Bars that show progress; without a terminal they print every 15 seconds."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def new_bar(name: str, **settings: Any) -> Any:
    """A bar of tqdm, which shows nothing on a terminal that says it has no rows, as a new pseudo-terminal does."""
    from tqdm import tqdm

    size: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # there is no terminal
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
        size = {"dynamic_ncols": True} if columns and rows else {"ncols": columns or 80, "nrows": rows or 24}
    return tqdm(desc=name, mininterval=0.2 if sys.stderr.isatty() else 15.0, **size, **settings)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears after 2 seconds. Yields what sets how much is done, and in all."""
    with new_bar(name, unit="tok", unit_scale=True, delay=2.0, leave=False) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
