"""A progress bar for evaluations."""

import sys
from collections.abc import Callable


class ProgressBar:
    """A progress bar. It appears after 2 seconds; without a terminal it prints every 15 seconds.

    unit: of the counts that it is given.
    """

    def __init__(self, name: str, unit: str = "tok") -> None:
        from tqdm import tqdm

        every = 0.2 if sys.stderr.isatty() else 15.0  # seconds
        self.bar = tqdm(
            desc=name, unit=unit, unit_scale=True, mininterval=every, delay=2.0, leave=False, ncols=80
        )  # fmt: skip

    def __enter__(self) -> Callable[[int, int], None]:
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.update(done - self.bar.n)
