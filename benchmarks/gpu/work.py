"""Items of work in processes of their own, within a budget of time.

A kernel that faults takes the rest of its process with it, and one that hangs never returns; neither ends the others.
"""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.gpu.journal import Journal, Line

POLL = 0.5  # seconds between looks at the clock
PATIENCE = 4  # times its expected seconds, after which an item is given up, but not before LEAST
LEAST = 60.0


@dataclass(frozen=True)
class Item:
    """A piece of work that is done, or left out, as a whole.

    run: yields its lines, from a picklable scale; a line with `"ok": False` makes the item a failed one. seconds: that
    it is expected to take. alone: whether it is timed, so that nothing may run beside it.
    """

    name: str
    run: Callable[[Any], Iterable[Line]]
    seconds: float
    alone: bool = False


class Budget:
    """Seconds that are left. clock: returns seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._end = clock, clock() + seconds

    def part(self, share: float) -> "Budget":
        """A budget of a share of what is left."""
        return Budget(share * self.left, self._clock)

    @property
    def left(self) -> float:
        return self._end - self._clock()


@dataclass
class _Worker:
    """A process, and the item that it is at, with the time left when it began; None: it waits for one."""

    process: BaseProcess
    connection: Any
    item: Item | None = None
    began: float = 0.0
    failed: bool = False


def run(items: Sequence[Item], scale: Any, journal: Journal, budget: Budget, processes: int) -> bool:
    """Do the items in their order, each in one of so many processes, and write their lines.

    An item that is not expected to end within the budget is left out, which its line says; one that has not ended with
    the budget fails. Returns whether all is well.
    """
    waiting, workers, well = deque(items), [], True
    try:
        while waiting or any(worker.item for worker in workers):
            _hand_out(waiting, workers, scale, journal, budget, processes)
            busy = [worker for worker in workers if worker.item]
            wait([worker.connection for worker in busy], timeout=POLL)
            for worker in busy:
                well = _receive(worker, journal, budget) and well
                if worker.failed:
                    _end(worker)
                    workers.remove(worker)
    finally:
        for worker in workers:
            _end(worker)
    return well


def _hand_out(
    waiting: deque[Item], workers: list[_Worker], scale: Any, journal: Journal, budget: Budget, processes: int
) -> None:
    """Give items to idle processes, and start processes for the others."""
    while waiting:
        if waiting[0].seconds > budget.left:
            item = waiting.popleft()
            journal.write({"kind": "item", "item": item.name, "status": "left out", "expected": item.seconds})
            continue
        worker = next((each for each in workers if each.item is None), None)
        if worker is None:
            if len(workers) == processes:
                return
            workers.append(worker := _start(scale))
        worker.item, worker.began = waiting.popleft(), budget.left
        worker.connection.send(worker.item)


def _start(scale: Any) -> _Worker:
    context = multiprocessing.get_context("forkserver")  # imports torch once, and knows nothing of this process' CUDA
    context.set_forkserver_preload(["benchmarks.gpu.items"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, scale), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _receive(worker: _Worker, journal: Journal, budget: Budget) -> bool:
    """Write what a process has sent. Returns False where its item failed; the process then has `failed`."""
    assert worker.item is not None
    item, taken = worker.item, worker.began - budget.left
    about = {"item": item.name}
    try:
        while worker.connection.poll():
            line: Line = worker.connection.recv()
            if line["kind"] != "item":
                journal.write({"kind": line["kind"], **about, **line})
                continue
            journal.write({"kind": "item", **about, **line, "seconds": round(taken, 2)})
            worker.item, worker.failed = None, line["status"] != "ok"
            return not worker.failed
        if budget.left > 0 and taken < max(LEAST, PATIENCE * item.seconds):
            return True
        error = "no time is left" if budget.left <= 0 else f"no end after {taken:.0f} s"
    except (EOFError, ConnectionError):
        worker.process.join()
        error = f"its process ended with {worker.process.exitcode}"
    ended = {"status": "failed", "error": error, "seconds": round(taken, 2)}
    journal.write({"kind": "item", **about, **ended})
    worker.item, worker.failed = None, True
    return False


def _serve(connection: Any, scale: Any) -> None:
    """The process of a worker: do items until there are none."""
    try:
        while True:
            connection.send(_done(connection.recv(), scale, connection.send))
    except (EOFError, ConnectionError, KeyboardInterrupt):  # this is what the end looks like here
        return


def _done(item: Item, scale: Any, send: Callable[[Line], None]) -> Line:
    """Do an item. send: gets its lines. Returns its last one."""
    wrong = 0
    try:
        for line in item.run(scale):
            wrong += line.get("ok") is False
            send(line)
    except Exception as error:  # whatever it is, it is this item's line, and others go on
        return {"kind": "item", "status": "failed", "error": summary(error)}
    return {"kind": "item", "status": "failed" if wrong else "ok", **({"error": f"{wrong} wrong"} if wrong else {})}


def summary(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
