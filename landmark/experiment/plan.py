"""What an experiment still has to do, and what that costs: runs, rows, FLOPs, hours, disk. Loads no torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from landmark.config import Config
from landmark.config.checks import resolve
from landmark.utils import flops as formula

# FLOP/s that a model of this kind is assumed to reach where nothing was measured: peak × utilisation.
CPU_CORE = 4.0e10
GPU_NAME, GPU = "one H100", 0.35 * 989e12
_HOUR = 3600.0


@dataclass(frozen=True)
class Job:
    """A run to train or a row to evaluate; `done` if its record is there.

    tokens: read, landmarks included. parameters: with and without embeddings.
    """

    kind: str  # run or row
    name: str
    config: Config
    done: bool
    tokens: float
    flops: float
    parameters: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """This machine, and the records of the runs trained so far."""

    cores: int
    gpus: int
    runs: Sequence[dict[str, Any]]

    def speed(self, job: Job) -> tuple[float, str]:
        """FLOP/s of a job and its source: trainings of this kind and size on like hardware, or a guess."""
        measured = [
            run["results"]["tokens_per_second"] * run["results"]["flops_per_token"]
            for run in self.runs
            if run["labels"]["size"] == job.config.size
            and run["settings"]["model"]["kind"] == job.config.model.kind
            and self._is_like(run["provenance"]["hardware"])
        ]
        if measured:
            return statistics.median(measured), f"measured, {len(measured)} run{'s' * (len(measured) > 1)}"
        if self.gpus:
            return GPU * self.gpus, f"assumed, {GPU / 1e12:.0f} TFLOP/s a GPU"
        return CPU_CORE * self.cores, f"assumed, {CPU_CORE / 1e9:.0f} GFLOP/s a core"

    def _is_like(self, hardware: dict[str, Any]) -> bool:
        if self.gpus:
            return len(hardware.get("gpus", [])) == self.gpus
        return not hardware.get("gpus") and hardware["cores"] == self.cores


def parameters(config: Config, vocab_size: int) -> tuple[int, int]:
    """Parameters of the decoder, with and without embeddings (tied to the head)."""
    model = config.model
    width = model.num_heads * model.head_dim
    layer = 4 * width * width + 2 * width * model.mlp_dim + 2 * width
    body = model.num_layers * layer + width + width * config.cmt.enabled
    return body + vocab_size * width, body


def run_job(name: str, config: Config, vocab_size: int, done: bool) -> Job:
    """A training, by the formula of `landmark.utils.flops`."""
    train, model = config.train, config.model
    tokens = float(train.steps) * train.batch_size * train.length
    window, cache = model.window or train.length, model.cache or 0
    keys = (train.length + 1) / 2 if model.kind != "transformer_xl" else (window + 1) / 2 + cache
    flops = tokens * _flops_per_token(config, vocab_size, keys)
    return Job("run", name, config, done, tokens, flops, parameters(config, vocab_size))


def row_job(name: str, config: Config, vocab_size: int, done: bool, split_tokens: int | None) -> Job:
    """An evaluation: a third of training's cost a token. split_tokens: of the split, None where unknown."""
    config = resolve(config)
    settings, block = config.eval, config.model.block_size
    tokens = float(settings.tokens or split_tokens or 0)
    local = settings.local or settings.length
    keys = local / 2
    if config.model.kind == "landmark" and block:
        tokens *= (block + 1) / block
        keys += config.retrieval.k * (block + 1) + settings.length / block
    if config.model.kind == "transformer_xl":
        keys += config.model.cache or 0
    if config.model.kind == "transformer" and config.memory.window is not None:
        keys += config.memory.sinks + config.memory.window
    flops = tokens * _flops_per_token(config, vocab_size, keys) / 3
    return Job("row", name, config, done, tokens, flops, parameters(config, vocab_size))


def report(jobs: Sequence[Job], machine: Machine) -> str:
    """The plan as text: one line a run or row, then totals and disk."""
    cells = [["what", "status", "parameters", "tokens", "FLOPs", "here", f"on {GPU_NAME}", "speed here"]]
    here_total = gpu_total = 0.0
    for job in jobs:
        speed, source = machine.speed(job)
        here, there = job.flops / speed / _HOUR, job.flops / GPU / _HOUR
        if not job.done:
            here_total, gpu_total = here_total + here, gpu_total + there
        total, body = job.parameters
        size = f"{_short(total)}, {_short(body)} without embeddings" if job.kind == "run" else ""
        costs = ["", "", ""] if job.done else [_hours(here), _hours(there), source]
        status = "done" if job.done else "missing"
        cells.append([f"{job.kind} {job.name}", status, size, _short(job.tokens), f"{job.flops:.1e}", *costs])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    missing = {kind: [job for job in jobs if job.kind == kind and not job.done] for kind in ("run", "row")}
    flops = sum(job.flops for group in missing.values() for job in group)
    return "\n".join(
        [
            *lines,
            "",
            f"missing: {len(missing['run'])} runs, {len(missing['row'])} rows, {flops:.1e} FLOPs: "
            f"about {_hours(here_total)} here, {_hours(gpu_total)} on {GPU_NAME} at {GPU / 1e12:.0f} TFLOP/s",
            f"disk: {_short(disk(missing['run']))}B, of which the weights stay",
        ]
    )


def disk(missing: Sequence[Job]) -> int:
    """Bytes that missing runs need: the weights of all, and meanwhile the three checkpoints of one."""
    sizes = [4 * job.parameters[0] for job in missing]
    return sum(sizes) + 3 * 3 * max(sizes, default=0)  # weights and two moments each


def flops_per_token(config: Config, vocab_size: int) -> float:
    """Training FLOPs a token as planned; a run's record keeps it, so that its speed serves later plans."""
    job = run_job("", config, vocab_size, False)
    return job.flops / job.tokens


def gpus() -> int:
    """GPUs of this machine, without loading torch."""
    return len([node for node in Path("/dev").glob("nvidia[0-9]*") if node.name[6:].isdigit()])


def _flops_per_token(config: Config, vocab_size: int, keys: float) -> float:
    model = config.model
    width = model.num_heads * model.head_dim
    return formula.flops_per_token(parameters(config, vocab_size)[0], model.num_layers, width, keys)


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{math.ceil(60 * hours)} min"


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"
