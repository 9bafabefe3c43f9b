"""How far a text is read."""

from __future__ import annotations

import logging
import threading
import time

LOG = logging.getLogger(__name__)
SILENCE = 5.0  # seconds without a sign of life, in a stream and in the log


class Progress:
    """How far a text is read; called with tokens read, and in all. The log is told now and then. gone: set where nobody
    waits any more, as the client has left.
    """

    def __init__(self, what: str, gone: threading.Event):
        self.gone, self.read, self.tokens = gone, 0, 0
        self._what, self._told = what, time.monotonic()

    def __call__(self, read: int, tokens: int) -> None:
        self.read, self.tokens = max(read, self.read if tokens == self.tokens else 0), tokens
        if time.monotonic() - self._told > SILENCE:
            self._told = time.monotonic()
            LOG.info("%s: %s of %s tokens read", self._what, f"{read:,}", f"{tokens:,}")
