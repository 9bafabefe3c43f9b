"""Signals by which a cluster takes a machine back: the step ends, a checkpoint is written, then the signal has its way.

SIGTERM comes at preemption and a while before a kill, SIGUSR1 and SIGUSR2 where a job asked for them (Slurm:
`--signal=USR1@120`; submitit: SIGUSR2). A launcher's own handler, such as one that requeues the job, is called after
the checkpoint; where there is none the training ends in `Stopped`.
"""

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import lightning

from landmark.utils.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

log = logging.getLogger(__name__)


class Interruption:
    """Notes the signals that come while a training listens; as a context it gives back the handlers there were."""

    def __init__(self, every: int) -> None:
        """every: steps between the looks that several devices take together, for each is a message among them."""
        self.every = every
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._came: signal.Signals | None = None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {each: signal.getsignal(each) for each in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def listen(self) -> None:
        """Take the signals over, from Lightning too, whose handlers send messages from within a step."""
        for each in self._before:
            signal.signal(each, self._note)

    def asked(self, trainer: lightning.Trainer) -> bool:
        """Whether to stop after this step; where there are several devices, whether any of them was asked to."""
        if trainer.world_size == 1:
            return self._came is not None
        if trainer.global_step % self.every:
            return False
        return trainer.strategy.reduce_boolean_decision(self._came is not None, all=False)

    def act(self, checkpoint: Path) -> None:
        """Let the signal do what it would have done. Raises Stopped, unless a handler of others returns."""
        came, self._came = self._came or signal.SIGTERM, None
        before = self._before.get(came)
        if callable(before):
            log.warning("%s: %s is written", came.name, checkpoint)
            before(came, None)
        elif before != signal.SIG_IGN:
            raise Stopped(came, checkpoint)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came = signal.Signals(signum)
