"""Errors for the user, or for the scheduler of a cluster."""

import signal
from pathlib import Path


def counted(count: int, noun: str) -> str:
    """As "1 run" or "2 runs"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def in_one_line(error: BaseException) -> str:
    """The message of an error, its white space as single spaces."""
    return " ".join(str(error).split())


class UserError(ValueError):
    """Bad input. The message, one line, names the fault, its place and the remedy."""


class Diverged(UserError):
    """A loss or a weight is no finite number any more, or a loss is beyond what numbers hold. Other rows can go on."""


class Stopped(SystemExit):
    """A signal, or trainer.max_time, ended a training after its checkpoint was written. The exit code is 128 + the
    signal's number, or 124, as of `timeout`.
    """

    def __init__(self, by: signal.Signals | None, checkpoint: Path) -> None:
        super().__init__(124 if by is None else 128 + by)
        name = "trainer.max_time" if by is None else by.name
        self.message = f"stopped by {name}, {checkpoint} is written: the same command goes on from there"
