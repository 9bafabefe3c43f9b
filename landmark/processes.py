"""A run trained by several processes, one a device, which torchrun starts beside this one.

This process -> torchrun (`_torchrun`, a session of its own) -> the processes that train. Their output passes through.
What is said to the first of them, an interrupt or SIGTERM, is said to all; if it dies, all do.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from landmark.errors import UserError
from landmark.lab.files import read_json, write_json
from landmark.lab.provenance import cores

FAILURE = "failure.json"  # in the run's folder: the error that ended its training
_DEATH_OF_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def train_together(module: str, folder: Path, count: int) -> None:
    """Run `python -m module folder` in `count` processes, as torchrun does.

    Raises UserError where one of them failed, with its own message if it raised one by `reported`; KeyboardInterrupt,
    or SystemExit with code 143, where this process was interrupted or sent SIGTERM meanwhile.
    """
    failure = folder / FAILURE
    failure.unlink(missing_ok=True)
    # As many threads as one process would have: torchrun's own default is one.
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // count))} | os.environ
    command = [sys.executable, "-m", __name__, module, str(folder), str(count)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    with _passed_on(process) as received:
        code = process.wait()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        sys.exit(128 + received[0])
    if failure.exists():
        message = read_json(failure)
        failure.unlink()
        raise UserError(message)
    if code:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise UserError(f"training {folder.name} in {count} processes failed ({how}): see the messages above")


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Of a process that trains with others: bad input is left in the folder, for `train_together` to raise."""
    die_with_parent()
    try:
        yield
    except UserError as error:
        write_json(folder / FAILURE, str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it dies, even of SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass interrupts and SIGTERM on to a process, once; yields the list of those that came."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not received:
            process.send_signal(number)
        received.append(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
            process.wait()


def _torchrun(module: str, folder: str, count: str) -> int:
    """torchrun, but without the report that it prints of a failure. Returns the exit code of what failed first."""
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    die_with_parent()
    logging.disable(logging.CRITICAL)
    try:
        run.run(run.parse_args(["--standalone", f"--nproc-per-node={count}", "-m", module, folder]))
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    code = _torchrun(*sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
