"""Time competitors in turn, a, b, c, a, b, c, …, so that a slow moment of the machine affects all of them."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from landmark.utils.source_tree import ROOT

Name = TypeVar("Name")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of several runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


def interleave(
    functions: Mapping[Name, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Time functions in turn.

    functions: by name. rounds: measurements of each function. warmup: rounds before these, which do not count. clock:
    returns seconds. Returns the seconds of each function in each round.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + rounds):
        for name, function in functions.items():
            started = clock()
            function()
            if turn >= warmup:
                seconds[name].append(clock() - started)
    return seconds


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """The ratios of values to the base values of the same rounds."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])


def peak_of_new_process(part: str, name: str, quick: bool) -> int:
    """Peak resident bytes of a process that only calls `run_once(name, quick)` of the part's module."""
    command = [sys.executable, "-m", "benchmarks.peak", part, name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)["peak_memory_bytes"]
