"""Threads take turns at a model: short turns, as a token of an answer, go before long ones, as a piece of a book."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Turn:
    """A turn that a thread waits for. has_waited: a long turn was in its way."""

    thread: int
    is_long: bool
    has_waited: bool
    comes: threading.Event = field(default_factory=threading.Event)


class Turns:
    """A lock that passes from thread to thread in the order in which they asked; its thread may take it again. But a
    short turn that a long one has kept waiting goes first.

    So between two tokens of an answer there is at most one piece of all books that are read, and each book goes on.

    answers: how many are being made (`answering`).
    """

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), list[_Turn]()
        self._owner: int | None = None
        self._depth, self._is_long, self.answers = 0, False, 0

    @property
    def are_wanted(self) -> bool:
        """Whether a thread waits for a short turn."""
        return any(not each.is_long for each in [*self._waiting])

    @contextmanager
    def taken(self, is_long: bool = False) -> Iterator[None]:
        """Wait for a turn, and have it."""
        self._take(is_long)
        try:
            yield
        finally:
            self._end()

    def __enter__(self) -> None:
        """A short turn."""
        self._take(False)

    def __exit__(self, *_: object) -> None:
        self._end()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """An answer is being made, from its question to its end, within turns and between them."""
        with self._lock:
            self.answers += 1
        try:
            yield
        finally:
            with self._lock:
                self.answers -= 1

    def _take(self, is_long: bool) -> None:
        with self._lock:
            if self._owner == (me := threading.get_ident()):
                self._depth += 1
                return
            turn = _Turn(me, is_long, self._is_long)
            if self._owner is None:
                return self._give(turn)
            self._waiting.append(turn)
        try:
            turn.comes.wait()
        except BaseException:  # Ctrl-C
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._pass_on()
            raise

    def _give(self, turn: _Turn) -> None:
        self._owner, self._depth, self._is_long = turn.thread, 1, turn.is_long
        for each in self._waiting if turn.is_long else ():
            each.has_waited = True
        turn.comes.set()

    def _end(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    def _pass_on(self) -> None:
        self._owner, self._is_long = None, False
        if self._waiting:
            kept = (each for each in self._waiting if each.has_waited and not each.is_long)
            self._waiting.remove(turn := next(kept, self._waiting[0]))
            self._give(turn)
