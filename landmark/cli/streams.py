"""The standard streams of a command, which may be closed, full, or a pipe that nobody reads any more."""

import io
import os
import sys


class _Forgiving(io.FileIO):
    """A file that drops what it cannot take."""

    def write(self, data) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def open_streams() -> None:
    """Give closed streams the null device, and drop messages that the standard error cannot take.

    A closed stream's number would go to the next file that is opened, and messages into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")  # pyright: ignore
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")  # pyright: ignore
    if sys.stderr is None or (isinstance(sys.stderr, io.TextIOWrapper) and _is_standard_error(sys.stderr)):
        buffer = io.BufferedWriter(_Forgiving(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In a pipe, too, a row is seen when it is done; and what the terminal cannot show does not end a command.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")


def drop_output() -> None:
    """Drop what waits to be printed if it cannot be; else Python would report it once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_standard_error(stream: io.TextIOWrapper) -> bool:
    try:
        return stream.fileno() == 2
    except (OSError, ValueError):
        return False
