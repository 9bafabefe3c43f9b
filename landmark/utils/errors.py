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
    """A signal ended a training after its checkpoint was written. The exit code is 128 + the signal's number."""

    def __init__(self, by: signal.Signals, checkpoint: Path) -> None:
        super().__init__(128 + by)
        self.message = f"stopped by {by.name}, {checkpoint} is written: the same command goes on from there"
