"""Signals with which a cluster ends a job, and Ctrl-C.

Clusters send SIGTERM at preemption and some time before a kill, and SIGUSR1 or SIGUSR2 if the job requests it (Slurm:
`--signal=USR1@120`; submitit: SIGUSR2). After a signal:

1. The current step is finished, and a checkpoint is written.
2. The handler that was installed before ours is called, such as that of a launcher, which requeues the job.
3. Without such a handler the training ends with `Stopped`.

Ctrl-C is a signal like the others (SIGINT), except that a second one ends the training at once.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lightning import Trainer

from landmark.utils.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = b"\nCtrl-C: finishing the step, then a checkpoint is written; press it again to stop at once\n"

log = logging.getLogger(__name__)


class Interruption:
    """Handles signals during a training; as a context it restores the earlier handlers at the end."""

    def __init__(self, every: int) -> None:
        """every: steps between checks where there are several devices, because each check takes communication."""
        self.every = every
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._came: signal.Signals | None = None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            self._before = {each: signal.getsignal(each) for each in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def install_handlers(self) -> None:
        """Replace Lightning's handlers, which communicate between devices in the middle of a step."""
        for each in self._before:
            signal.signal(each, self._note)

    def stop_requested(self, trainer: Trainer) -> bool:
        """Whether to stop after this step, because a signal came to some device."""
        if trainer.world_size == 1:
            return self._came is not None
        if trainer.global_step % self.every:
            return False
        return trainer.strategy.reduce_boolean_decision(self._came is not None, all=False)

    def pass_on(self, checkpoint: Path) -> None:
        """Call the earlier handler of the signal. Raises Stopped if there is none but Python's own."""
        came, self._came = self._came or signal.SIGTERM, None
        before = self._before.get(came)
        if callable(before) and before is not signal.default_int_handler:
            log.warning("%s: %s is written", came.name, checkpoint)
            before(came, None)
        elif before != signal.SIG_IGN:
            raise Stopped(came, checkpoint)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            if self._came == signal.SIGINT:
                raise KeyboardInterrupt
            os.write(2, INTERRUPTED)  # a handler must not use a stream that it may have interrupted
        self._came = signal.Signals(signum)
