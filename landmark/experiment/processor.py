"""How torch uses a CPU: its float32 products, and as many threads as are fastest beside other work.

Two threads on two busy cores wait for each other at every operation and can be ten times slower than one. So a short
piece of training is timed with each number of threads, once in a process for each shape of model.
"""

import functools
import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from landmark.config import Config
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.hardware import cores, hardware
from landmark.utils.team import started_together

PROCESSOR = "processor.json"  # in a run's folder: what was used, so that a training goes on bit for bit
_FLOPS, _TIMES, _SECONDS = 5e8, 5, 2.0  # of a timed piece; how often and how long it is timed at most
_GAIN = 1.1  # fewer threads than cores are used where they are this much faster
_log = logging.getLogger(__name__)


def set_up_processor(config: Config, run: Path | None = None) -> None:
    """Give torch its threads and its float32 products on a CPU; where a GPU computes, only threads that are asked for.

    Threads are those of `trainer.threads`, of OMP_NUM_THREADS, or else the fastest number; products those of
    `trainer.matmul` (`landmark.utils.matmul`). Processes that train together do not probe, as they could find different
    answers: they share the machine's cores evenly, and compute products exactly.

    run: folder of a training, which goes on as it began, on a machine of the same kind, unless the user names others.
    """
    import torch

    from landmark.utils.matmul import set_matmul

    on_gpu = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    if on_gpu:
        return
    team, kept, matmul = started_together(), _kept(run), config.trainer.matmul
    if config.trainer.threads is None and "OMP_NUM_THREADS" not in os.environ:
        if "threads" in kept:
            torch.set_num_threads(kept["threads"])
        elif team is not None:
            torch.set_num_threads(max(1, min(cores(), (os.cpu_count() or 1) // team.local_size)))
        elif cores() > 1:
            torch.set_num_threads(_choose(config))
    if matmul == "auto":
        matmul = kept.get("matmul") or ("auto" if team is None else "highest")
    used = {"threads": torch.get_num_threads(), "matmul": set_matmul(matmul)}
    is_first = team is None or team.rank == 0
    if run is not None and is_first and not used.items() <= kept.items():
        write_json(run / PROCESSOR, used | _machine())


def fastest(seconds: Mapping[int, Sequence[float]]) -> int:
    """The number of threads to use: the highest, unless another one is faster by a tenth.

    seconds: measured with each number of threads.
    """
    medians = {threads: statistics.median(each) for threads, each in seconds.items()}
    most, best = max(medians), min(medians, key=lambda threads: medians[threads])
    return best if medians[most] > _GAIN * medians[best] else most


def _machine() -> dict[str, Any]:
    return {"cpu": hardware()["cpu"], "cores": cores()}


def _kept(run: Path | None) -> dict[str, Any]:
    """What a training began with, where it was on the same processor with as many cores."""
    with suppress(UserError):
        if run is not None:
            kept = read_json(run / PROCESSOR, {"cpu": str, "cores": int, "threads": int, "matmul": str})
            if _machine().items() <= kept.items() and kept["threads"] > 0 and kept["matmul"] in ("highest", "medium"):
                return kept
    return {}


def _choose(config: Config) -> int:
    model, train = config.model, config.train
    return _fastest_for(model.num_heads * model.head_dim, model.mlp_dim, train.batch_size * train.length)


@functools.cache
def _fastest_for(width: int, inner: int, tokens: int) -> int:
    """The number of threads for models of this shape, measured once in a process. Arguments: as of `_measured`."""
    seconds = _measured(width, inner, tokens, sorted({1, max(1, cores() // 2), cores()}))
    chosen = fastest(seconds)
    if chosen < cores():
        gain = statistics.median(seconds[cores()]) / statistics.median(seconds[chosen])
        _log.info(
            "%d thread%s on %d cores: %.1f times as fast as %d here and now (trainer.threads=N sets another number)",
            chosen, "s" * (chosen > 1), cores(), gain, cores(),
        )  # fmt: skip
    return chosen


def _measured(width: int, inner: int, tokens: int, candidates: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of a perceptron's forward and backward pass, the numbers of threads taking turns.

    Args:
        width: of the model.
        inner: of the perceptron.
        tokens: of a batch; a part of them is timed.
        candidates: numbers of threads.
    """
    import torch
    import torch.nn.functional as F

    tokens = max(16, min(tokens, int(_FLOPS / (12 * width * inner))))
    generator = torch.Generator().manual_seed(0)  # not the one that draws the weights
    x = torch.randn(tokens, width, generator=generator)
    first, second = (torch.randn(shape, generator=generator) for shape in ((inner, width), (width, inner)))
    first.requires_grad_()
    seconds: dict[int, list[float]] = {threads: [] for threads in candidates}
    began = time.perf_counter()
    for attempt in range(_TIMES + 1):
        if attempt > 1 and time.perf_counter() - began > _SECONDS:
            break
        for threads in candidates:
            torch.set_num_threads(threads)
            started = time.perf_counter()
            F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), first)), second).sum().backward()
            if attempt:  # the first one starts the threads
                seconds[threads].append(time.perf_counter() - started)
    return seconds
