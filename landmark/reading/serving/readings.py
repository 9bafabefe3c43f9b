"""Texts that are read while their clients may be away; of each client one after the other."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from landmark.reading.answering import Gone
from landmark.reading.serving import responses
from landmark.reading.serving.memories import Full, Missing
from landmark.reading.serving.progress import Progress


@dataclass(eq=False)
class _Reading:
    """One that goes on, or has failed. error: one line."""

    progress: Progress
    error: str = ""


class Readings:
    """The texts that are being read, and those that could not be, until they are dismissed."""

    def __init__(self, most: int):
        """most: of all clients."""
        self._most, self._lock, self._threads = most, threading.Lock(), set[threading.Thread]()
        self._all: dict[tuple[str, str], _Reading] = {}
        self._one_at_a_time = defaultdict[str, threading.Lock](threading.Lock)

    def start(self, client: str, name: str, progress: Progress, work: Callable[[], Any]) -> None:
        """Do work in a thread, in place of what was read under the name. Raises Full where too many are read."""
        with self._lock:
            if len(self._all) >= self._most:
                raise Full(f"{len(self._all)} texts are being read: this server takes no more at once; wait")
            if (before := self._all.get((client, name))) is not None:
                before.progress.gone.set()
            reading = self._all[client, name] = _Reading(progress)
            thread = threading.Thread(target=self._read, args=(client, name, reading, work))
            self._threads.add(thread)
            thread.start()

    def list(self, client: str) -> list[dict[str, Any]]:
        """How far each text of a client is read, and which could not be."""
        with self._lock:
            mine = [(name, each) for (own, name), each in self._all.items() if own == client]
        read = [(name, each.error, each.progress.read, each.progress.tokens) for name, each in mine]
        return [
            {
                "id": name,
                "object": "document.reading",
                **({"error": error} if error else {"read": at, "tokens": tokens}),
            }
            for name, error, at, tokens in read
        ]

    def stop(self, client: str, name: str) -> None:
        """End a reading, or forget that it failed. Raises Missing."""
        with self._lock:
            if (reading := self._all.pop((client, name), None)) is None:
                raise Missing(f"document {name}: none of this name is being read")
            reading.progress.gone.set()

    def wait(self) -> None:
        """Until all have ended, which were told to."""
        for thread in [*self._threads]:
            thread.join()

    def _read(self, client: str, name: str, reading: _Reading, work: Callable[[], Any]) -> None:
        try:
            with self._one_at_a_time[client]:
                work()
        except Gone:
            pass
        except Exception as raised:
            reading.error = responses.error_of(raised)["error"]["message"]
        with self._lock:
            self._threads.discard(threading.current_thread())
            if not reading.error and self._all.get((client, name)) is reading:
                del self._all[client, name]
