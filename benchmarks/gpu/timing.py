"""Time on the device and on the host, apart.

A call is launched behind a pause of the device, so that all its kernels wait in the queue: the events around it then
measure the kernels alone, without the gaps in which the device would wait for Python. How long Python takes to launch
them is measured on its own. Before each call a write to a large tensor takes the inputs out of the cache.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.journal import Line
from benchmarks.gpu.shapes import Scale
from benchmarks.report import Target
from benchmarks.timing import Spread, ratios

CYCLES = 2e9  # of a second of the pause, at most
LONGEST_PAUSE = 0.05  # seconds
CACHE = 256 << 20  # bytes, of more than any cache
SECONDS = 0.3  # of a competitor's rounds, about


@dataclass
class Times:
    """Seconds of each round. device: of the kernels. host: until all are launched."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def timed(functions: Mapping[str, Callable[[], object]], scale: Scale) -> dict[str, Times]:
    """The times of functions that take turns; each is called twice before."""
    times = {name: Times() for name in functions}
    hosts, slowest = {}, 0.0
    for name, function in functions.items():
        function()
        hosts[name], whole = launched(function, scale)
        slowest = max(slowest, whole)
    rounds = max(3, min(scale.rounds, round(SECONDS / slowest)))
    cache = torch.empty(CACHE if scale.is_gpu else 1, dtype=torch.int8, device=scale.device)
    for _ in range(rounds):
        for name, function in functions.items():
            cache.zero_()
            host, whole = launched(function, scale)
            times[name].host.append(host)
            times[name].device.append(_on_device(function, hosts[name], cache) if scale.is_gpu else whole)
    return times


def launched(function: Callable[[], object], scale: Scale) -> tuple[float, float]:
    """Seconds until a call has returned, and until the device has done all of it."""
    if scale.is_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    returned = time.perf_counter()
    if scale.is_gpu:
        torch.cuda.synchronize()
    return returned - started, time.perf_counter() - started


def _on_device(function: Callable[[], object], host: float, cache: torch.Tensor) -> float:
    """Seconds that the device computes. host: that the call takes to launch its kernels."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cache.zero_()
    torch.cuda._sleep(int(CYCLES * min(2 * host + 1e-4, LONGEST_PAUSE)))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def lines(
    setting: str, times: Mapping[str, Times], against: str, targets: Mapping[str, Target] | None = None
) -> list[Line]:
    """A line for each competitor: medians and quartiles in milliseconds, and ratios taken round by round.

    Args:
        setting: what was measured, in words.
        times: by competitor.
        against: the competitor that the others are compared with.
        targets: bounds on the ratios of device times, by competitor; None: there are none.
    """
    found = []
    for name, of_name in times.items():
        device, host = (Spread.of([1e3 * second for second in each]) for each in (of_name.device, of_name.host))
        ratio, target = ratios(of_name.device, times[against].device), (targets or {}).get(name)
        verdict = {} if target is None else {"target": str(target), "met": target.met(ratio.median)}
        found.append(
            {
                "kind": "time",
                "setting": setting,
                "measured": name,
                "device_ms": _rounded(device),
                "host_ms": _rounded(host),
                "rounds": device.runs,
                "against": against,
                "ratio": _rounded(ratio),
                **verdict,
            }
        )
    return found


def _rounded(spread: Spread) -> list[float]:
    """Median and quartiles, with four digits."""
    return [float(f"{value:.4g}") for value in (spread.median, spread.low, spread.high)]
