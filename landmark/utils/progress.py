"""A progress bar for evaluations."""

import os
import sys
from collections.abc import Callable
from typing import Any


def terminal_size() -> dict[str, Any]:
    """For tqdm, which shows nothing on a terminal that says it has no rows, as a new pseudo-terminal does."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal
        return {}
    return {"dynamic_ncols": True} if columns and rows else {"ncols": columns or 80, "nrows": rows or 24}


class ProgressBar:
    """A bar that appears after 2 seconds; without a terminal it prints every 15 seconds."""

    def __init__(self, name: str, unit: str = "tok") -> None:
        from tqdm import tqdm

        every = 0.2 if sys.stderr.isatty() else 15.0  # seconds
        self.bar = tqdm(
            desc=name, unit=unit, unit_scale=True, mininterval=every, delay=2.0, leave=False, **terminal_size()
        )  # fmt: skip

    def __enter__(self) -> Callable[[int, int], None]:
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, done: int, total: int) -> None:
        """Show progress."""
        self.bar.total = total
        self.bar.update(done - self.bar.n)
