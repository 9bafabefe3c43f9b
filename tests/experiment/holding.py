"""A process that holds a lock of an output folder."""

import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from landmark.experiment.records import Records
from tests.forked import CONTEXT, PRELOADED


def hold(output: Path, kind: str, identity: str) -> BaseProcess:
    """Start it, and wait until it holds the lock of a run or a row until it is killed."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    held = CONTEXT.Event()
    process = CONTEXT.Process(target=_hold, args=(output, kind, identity, held), daemon=True)
    process.start()
    assert held.wait(60)
    return process


def _hold(output: Path, kind: Any, identity: str, held: Any) -> None:
    with Records(output).lock(kind, identity):
        held.set()
        time.sleep(600)
