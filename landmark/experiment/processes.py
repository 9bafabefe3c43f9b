"""A run trained by several processes, one per device, which torchrun starts beside this one.

This process starts torchrun (`_torchrun`) in a session of its own, and torchrun starts the processes that train. Their
output passes through. An interrupt or a SIGTERM of this process reaches them all, and they die with it.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.hardware import cores
from landmark.utils.team import Lost, leave, lost_in_one_line

FAILURE = "failure.json"  # in the run's folder: the error that ended its training
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_DEATH_OF_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def train_together(module: str, folder: Path, count: int) -> None:
    """Run `python -m module folder` in `count` processes, as torchrun does.

    Raises UserError where one of them failed, with its own message if it raised one within `errors_left_in`. A signal
    to this process stops them; then it has its usual effect here: KeyboardInterrupt, the handler set before, or
    SystemExit.
    """
    failure = folder / FAILURE
    # As many threads as one process would have: torchrun's own default is one.
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // count))} | os.environ
    command = [sys.executable, "-m", __name__, module, str(folder), str(count)]
    while True:
        failure.unlink(missing_ok=True)
        with _passed_on(subprocess.Popen(command, env=environment, start_new_session=True)) as (process, received):
            code = process.wait()
        if not received:
            break
        handler = signal.getsignal(received[0])
        if handler == signal.SIG_DFL:
            print(f"stopped by {signal.Signals(received[0]).name}: the same command goes on from here", file=sys.stderr)
            sys.exit(128 + received[0])
        if callable(handler):
            handler(received[0], None)  # if it returns there is no reason to stop, as it is with one process
    if failure.exists():
        message = read_json(failure)
        failure.unlink()
        raise UserError(message)
    if code:
        how = f"ended by {signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"
        raise UserError(f"training {folder.name} in {count} processes failed ({how}): see the messages above")


@contextmanager
def errors_left_in(folder: Path) -> Iterator[None]:
    """In a process that trains with others: leave a UserError in the folder, for `train_together` to raise.

    The connections with the others are closed when the process ends.
    """
    die_with_parent()
    atexit.register(leave)
    try:
        with lost_in_one_line():
            yield
    except Lost as error:  # not the first error
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        write_json(folder / FAILURE, str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Pass the first signal on to a process: an interrupt unchanged, others as SIGTERM; an interrupt after it kills.

    Yields the process and the signals.
    """
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not received:
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif number == signal.SIGINT:  # a second Ctrl-C; the others die with this process
            process.kill()
        received.append(number)

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        yield process, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _torchrun(module: str, folder: str, count: str) -> int:
    """torchrun without its own report of a failure. Returns the exit code of the first process that failed, or 128 +
    the number of the signal that ended it."""
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    die_with_parent()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # which a cluster sends to every process of a job
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    try:
        run.run(run.parse_args(["--standalone", f"--nproc-per-node={count}", "-m", module, folder]))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(_torchrun(*sys.argv[1:]))
