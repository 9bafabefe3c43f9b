"""What the kernels compute and how long they take, on a GPU, in a few minutes: `python -m benchmarks.gpu`.

1. Checks, in several processes that share Triton's cache: so they compile every kernel that is timed.
2. Timings, one after the other, the most important ones first.

Each result is a line of JSON on the standard output and in a file, as soon as there is one. An item that fails is a
line with its error; the others go on, and the exit status is 1. What the time does not suffice for, or what was
interrupted, is done by the same command with --resume.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.items import FULL, TINY, items_of
from benchmarks.gpu.journal import Journal, header
from benchmarks.gpu.work import Budget, Item, run
from benchmarks.report import gpu_stem
from landmark.utils.errors import UserError

RESULTS = Path(__file__).parents[1] / "results"
SHARE = 0.45  # of the time, at most, that checks get where there are timings


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=str(__doc__).partition(":")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="that all may take (8)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON (benchmarks/results/GPU.jsonl)")
    parser.add_argument("--resume", action="store_true", help="go on in the file, without the items that ended well")
    parser.add_argument("--only", metavar="WORDS,…", default="", help="items whose names begin with one of these")
    parser.add_argument("--processes", type=int, default=12, help="that compile and check beside each other (12)")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU, kernels interpreted")
    parser.add_argument("--list", action="store_true", help="name the items, with the seconds expected of each")
    return parser.parse_args(words)


def main(words: Sequence[str], items: Sequence[Item] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Do what is asked, and return the exit status. items: None: all. clock: returns seconds."""
    arguments = parse(words)
    scale = TINY if arguments.rehearse else FULL
    items = items_of(scale) if items is None else items
    items = [item for item in items if item.name.startswith(tuple(arguments.only.split(",")))]
    if arguments.list:
        print(*(f"{item.seconds:6.0f} s  {item.name}" for item in items), sep="\n")
        return 0
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("error: torch sees no GPU: run this on a machine with a GPU, or with --rehearse", file=sys.stderr)
        return 1
    budget = Budget(60 * arguments.minutes, clock)
    try:
        journal = Journal(arguments.out or RESULTS / f"{gpu_stem()}.jsonl", arguments.resume)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    journal.write(header(words, arguments.minutes))
    items = [item for item in items if item.name not in journal.done]
    beside, alone = ([item for item in items if item.alone == kind] for kind in (False, True))
    try:
        well = run(beside, scale, journal, budget.part(SHARE if alone else 1.0), arguments.processes)
        well = run(alone, scale, journal, budget, 1) and well
    except BaseException as error:
        journal.write({"kind": "end", "status": "interrupted", "error": type(error).__name__})
        raise
    journal.write({"kind": "end", "status": "ok" if well else "failed", "seconds_left": round(budget.left, 1)})
    return 0 if well else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the journal gets its end
    sys.exit(main(sys.argv[1:]))
