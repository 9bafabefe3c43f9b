"""Whether all processes of a team are there: each says that it has come, and gives signs of life until it leaves.

A process that is stopped, or whose link is down, does not fail, and the others would wait for it. So each process
counts in a store that all of them reach, and watches the counts, in threads. It counts the rounds in which one is
silent, not the time: where all are stopped together, as a cluster may do, nobody is missing afterwards.
"""

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from landmark.utils.errors import UserError
from landmark.utils.team import Team

ROUNDS = 10  # in which a process may be silent
_LEFT = b"left"


class Presence:
    """store: PyTorch's, of all processes. team: this one. patience: seconds for which another may be silent."""

    def __init__(self, store: Any, team: Team, patience: float) -> None:
        self._store, self._team, self._patience = store, team, patience
        self._names = [f"presence/{rank}" for rank in range(team.size)]
        self._signs: Sequence[bytes] = [b""] * team.size  # read last
        self._has_left = threading.Event()

    def join(self) -> None:
        """Wait until all have come. Raises UserError, naming those that have not."""
        self._sign(0)
        try:
            self._store.wait(self._names, timedelta(seconds=self._patience))
        except RuntimeError:
            missing = [rank for rank, name in enumerate(self._names) if not self._store.check([name])]
            raise UserError(
                f"{_named(missing)} of {self._team.size} processes did not join within {shown(self._patience)}: see "
                "their messages; trainer.patience sets the minutes"
            ) from None

    def watch(self) -> None:
        """From now on, end this process where another is silent, and say which."""
        self._exchanging = threading.Thread(target=self._exchange, daemon=True)
        self._exchanging.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def leave(self) -> None:
        """Nobody is to miss this process any more."""
        self._has_left.set()
        self._exchanging.join(1)

    def _sign(self, count: int) -> None:
        self._store.set(self._names[self._team.rank], f"{count} {platform.node()}")

    def _exchange(self) -> None:
        """Give signs of life, and read those of all. It has a connection of its own, which another may block."""
        with suppress(RuntimeError):  # of a store whose process has ended: every operation with it says so
            self._store, count = self._store.clone(), 0
            while not self._has_left.wait(self._patience / ROUNDS):
                count += 1
                self._sign(count)
                self._signs = self._store.multi_get(self._names)
            self._store.set(self._names[self._team.rank], _LEFT.decode())
        self._has_left.set()

    def _watch(self) -> None:
        before, silent = self._signs, [0] * self._team.size
        while not self._has_left.wait(self._patience / ROUNDS):
            now = self._signs
            silent = [
                count + 1 if sign == last != _LEFT else 0 for count, sign, last in zip(silent, now, before, strict=True)
            ]
            before = now
            missing = [rank for rank, count in enumerate(silent) if count > ROUNDS]
            if self._team.rank in missing:  # which does not read its own sign
                end("the process that keeps the store of all, rank 0 or torchrun,", self._patience)
            if missing:
                hosts = {now[rank].decode().partition(" ")[2] for rank in missing}
                end(f"{_named(missing)} ({', '.join(sorted(hosts))})", self._patience)


def end(who: str, patience: float) -> None:
    """End this process at once, with one line: the operation that waits for another cannot be interrupted."""
    print(
        f"error: {who} gave no sign of life for {shown(patience)}: stopped, or cut off; the same command goes on from "
        "the last checkpoint (trainer.patience sets the minutes)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def is_reached(address: str, port: int, patience: float) -> bool:
    """Whether somebody listens there, or does before so many seconds are over."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((address, port), timeout=patience):
            return True
        time.sleep(patience / 100)
    return False


@contextmanager
def within(patience: float, who: str) -> Iterator[None]:
    """End this process, naming who is missing, where what is done here takes longer."""
    timer = threading.Timer(patience, end, (who, patience))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def shown(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} seconds"
