"""Cost of an experiment's missing runs and rows: FLOPs, hours, disk. Loads no torch but for models of transformers."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from landmark.experiment.config import SYNTHETIC, Config
from landmark.experiment.evaluation.chunks import attention_size, chunk_length, kept_tokens
from landmark.models.config import decoder_config
from landmark.utils.errors import counted
from landmark.utils.flops import PEAK_BF16_FLOPS, flops_per_token, keys_per_query

# FLOP/s that a model of this kind is assumed to reach where nothing was measured: peak × utilisation.
CPU_CORE = 4.0e10
GPU_NAME, GPU_PEAK = "one H100", {"bf16-mixed": PEAK_BF16_FLOPS["H100"], "32-true": 67e12}
UTILISATION = 0.3, 0.08  # of the peak, at best and at worst; measured on an H200: 0.20 (paper), 0.085 (small)
LAUNCHES = 0.0005, 0.002  # seconds that a layer's kernels take to start, at best and at worst, however small they are
GPU = 0.2 * GPU_PEAK["bf16-mixed"]
TOKENS_AT_ONCE = 4096  # of an evaluation
_HOUR = 3600.0


@dataclass(frozen=True)
class Cost:
    """Cost of a run to train or a row to evaluate. tokens: read, landmarks included; 0: unknown. flops: in all.
    parameters: with and without embeddings. passes: of a layer, forward and perhaps back. begun: steps of a training
    that a checkpoint has, and the other numbers have not.
    """

    kind: str  # run or row
    name: str
    config: Config
    is_done: bool
    tokens: float
    flops: float
    parameters: tuple[int, int]
    passes: float = 0.0
    begun: int = 0

    @property
    def status(self) -> str:
        if self.is_done:
            return "done"
        return f"step {self.begun:,} of {self.config.train.steps:,}" if self.begun else "missing"

    @property
    def gpu_hours(self) -> tuple[float, float]:
        """Hours on one H100 at best and at worst, by `UTILISATION` and `LAUNCHES`."""
        peak = GPU_PEAK[self.config.train.precision]
        low, high = (
            max(self.flops / (share * peak), self.passes * launch) / _HOUR
            for share, launch in zip(UTILISATION, LAUNCHES)
        )
        return low, high


@dataclass(frozen=True)
class Machine:
    """This machine, and the records of the runs trained so far."""

    cores: int
    gpus: int
    runs: Sequence[dict[str, Any]]

    def speed(self, cost: Cost) -> tuple[float, str]:
        """FLOP/s and their source: trainings of this kind and size on the same hardware, or an assumption."""
        measured = [
            run["results"]["tokens_per_second"] * run["results"]["flops_per_token"]
            for run in self.runs
            if run["labels"]["size"] == cost.config.size
            and run["settings"]["model"]["kind"] == cost.config.model.kind
            and self._is_like(run["provenance"]["hardware"])
        ]
        if measured:
            return statistics.median(measured), f"measured, {counted(len(measured), 'run')}"
        if self.gpus:
            return GPU * self.gpus, f"assumed, {GPU / 1e12:.0f} TFLOP/s a GPU"
        return CPU_CORE * self.cores, f"assumed, {CPU_CORE / 1e9:.0f} GFLOP/s a core"

    def _is_like(self, hardware: dict[str, Any]) -> bool:
        if self.gpus:
            return len(hardware.get("gpus", [])) == self.gpus
        return not hardware.get("gpus") and hardware["cores"] == self.cores


def _measures(config: Config, vocab_size: int) -> tuple[int, int, int, int]:
    """Parameters of the decoder with and without embeddings (tied to the head), layers, and width."""
    model = config.model
    if model.name is not None:
        from landmark.models.pretrained import size_of

        total, body, found = size_of(model.name)
        return total, body, found.num_layers, found.hidden_dim
    width = model.num_heads * model.head_dim
    keys = (model.num_kv_heads or model.num_heads) * model.head_dim
    layer = 2 * width * (width + keys) + 2 * width * model.mlp_dim + 2 * width
    body = model.num_layers * layer + width + width * config.cmt.enabled
    return body + vocab_size * width, body, model.num_layers, width


def run_cost(name: str, config: Config, vocab_size: int, is_done: bool, begun: int = 0) -> Cost:
    """Cost of a training, by the formula of `landmark.utils.flops`. vocab_size: padded. begun: steps that it has."""
    train, model = config.train, config.model
    steps = float(max(0, train.steps - begun))
    tokens = steps * train.batch_size * train.length
    keys = keys_per_query(train.length, model.window, model.cache, model.masked)
    total, body, layers, width = _measures(config, vocab_size)
    flops = tokens * flops_per_token(total, layers, width, keys)
    return Cost("run", name, config, is_done, tokens, flops, (total, body), steps * layers, begun)


def row_cost(name: str, config: Config, vocab_size: int, is_done: bool, split_tokens: int | None) -> Cost:
    """Cost of an evaluation: a third of training's cost a token. split_tokens: of the evaluated split, if known."""
    settings, model = config.eval, config.model
    has_prompts = settings.question is not None or settings.probe is not None or config.data.name in SYNTHETIC
    tokens = float(settings.prompts * settings.length if has_prompts else settings.tokens or split_tokens or 0)
    shape = decoder_config(model, cmt=config.cmt.enabled)
    local = chunk_length(shape, settings.length, settings.local, kept_tokens(config))
    if model.kind == "landmark" and model.block_size:
        tokens *= (model.block_size + 1) / model.block_size
    keys = sum(attention_size(shape, config, settings.length, local))
    total, body, layers, width = _measures(config, vocab_size)
    flops = tokens * flops_per_token(total, layers, width, keys) / 3
    return Cost("row", name, config, is_done, tokens, flops, (total, body), tokens / TOKENS_AT_ONCE * layers)


def describe(costs: Sequence[Cost], machine: Machine) -> str:
    """The plan as text: one line a run or row, then totals and disk."""
    cells = [["what", "status", "parameters", "tokens", "FLOPs", "here", f"on {GPU_NAME}", "speed here"]]
    here_total, gpu_total = 0.0, [0.0, 0.0]
    for cost in costs:
        speed, source = machine.speed(cost)
        here, there = _rounded(cost.flops / speed / _HOUR), [_rounded(hours) for hours in cost.gpu_hours]
        if not cost.is_done:  # as they are shown, so that they add up to the total
            here_total, gpu_total = here_total + here, [a + b for a, b in zip(gpu_total, there)]
        total, body = cost.parameters
        size = f"{_short(total)}, {_short(body)} without embeddings" if cost.kind == "run" else ""
        hours = [_hours(here), _range(*there), source] if cost.tokens else ["?", "?", "the split's size is unknown"]
        hours = ["", "", ""] if cost.is_done else hours
        cells.append([f"{cost.kind} {cost.name}", cost.status, size, _short(cost.tokens), f"{cost.flops:.1e}", *hours])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    missing = {kind: [cost for cost in costs if cost.kind == kind and not cost.is_done] for kind in ("run", "row")}
    flops = sum(cost.flops for group in missing.values() for cost in group)
    rest = ", ".join(counted(len(group), kind) for kind, group in missing.items())
    return "\n".join(
        [
            *lines,
            "",
            f"missing: {rest}, {flops:.1e} FLOPs: about {_hours(here_total)} here, {_range(*gpu_total)} on {GPU_NAME}",
            f"{GPU_NAME} is assumed, after one H200: {UTILISATION[1]:.0%} to {UTILISATION[0]:.0%} of its peak, and "
            f"{1e3 * LAUNCHES[0]:g} to {1e3 * LAUNCHES[1]:g} ms for each layer of each step, however small",
            f"disk: {_short(disk(missing['run']))}B, of which the weights stay",
        ]
    )


def disk(missing: Sequence[Cost]) -> int:
    """Bytes that missing runs need: the weights of all, and meanwhile the three checkpoints of one."""
    sizes = [4 * cost.parameters[0] for cost in missing]
    return sum(sizes) + 3 * 3 * max(sizes, default=0)  # weights and two moments each


def _hours(hours: float) -> str:
    """Hours as a text: in hours, minutes or seconds."""
    rounded = _rounded(hours)
    if rounded >= 1:
        return f"{rounded:,.{0 if rounded >= 100 else 1}f} h"
    return f"{60 * rounded:.0f} min" if rounded >= 1 / 60 else f"{_HOUR * rounded:.0f} s"


def _range(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys((_hours(low), _hours(high))))


def _rounded(hours: float) -> float:
    """Up to an hour, below 100 hours to a tenth, below an hour to a minute, below a minute to a second."""
    step = 1 if hours >= 100 else 1 / 10 if hours >= 1 else 1 / 60 if hours >= 1 / 60 else 1 / _HOUR
    return math.ceil(round(hours / step, 6)) * step


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"
