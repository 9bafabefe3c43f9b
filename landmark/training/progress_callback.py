"""The callback that shows the progress of a training: a bar on a terminal, elsewhere a line every 15 seconds."""

import sys
import time
from typing import Any, TextIO

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from tqdm import tqdm

from landmark.training.lightning_module import ends_step
from landmark.training.measurement_callback import MeasurementCallback
from landmark.utils.progress import bar_width

SECONDS_BETWEEN_LINES = 15.0
SLOW, SLOW_FOR = 1 / 3, 3  # of the highest rate so far; measurements in a row that are below it


class ProgressCallback(Callback):
    """Shows step, loss, tokens/s and the remaining time, for the first device only."""

    def __init__(self, measurements: MeasurementCallback, name: str, stream: TextIO | None = None) -> None:
        self.measurements = measurements
        self.name = name
        self.stream = stream or sys.stderr
        self._bar: tqdm | None = None
        self._shown = 0.0
        self._began = 0.0
        self._first_step = 0
        self._rates: list[float] = []
        self._has_warned = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._shown = time.monotonic()
        self._first_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        if self.stream.isatty():
            self._bar = tqdm(
                desc=self.name,
                total=self.measurements.steps,
                initial=trainer.global_step,
                unit="step",
                ncols=bar_width(),
                file=self.stream,
            )
        else:
            again = f", going on at step {trainer.global_step}" if trainer.global_step else ""
            self._print(f"training for {self.measurements.steps} steps{again}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or not ends_step(trainer, batch_idx):
            return
        self._watch(pl_module.device.type)
        step, steps = trainer.global_step, self.measurements.steps
        if self._bar is not None:
            self._bar.set_postfix_str(self._values(), refresh=False)
            self._bar.update()
        elif (now := time.monotonic()) - self._shown >= SECONDS_BETWEEN_LINES or step == steps:
            self._shown = now
            left = (now - self._began) / (step - self._first_step) * (steps - step)
            self._print(f"step {step}/{steps}  {self._values()}  {tqdm.format_interval(left)} left")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _watch(self, device: str) -> None:
        """Say once that the rate has collapsed, and what helps: beside other work, threads wait for each other."""
        rate = self.measurements.latest.get("train/tokens_per_second")
        if self._has_warned or rate is None or self._rates[-1:] == [rate]:
            return
        self._rates.append(rate)
        threads, best = torch.get_num_threads(), max(self._rates)
        if device != "cpu" or threads == 1 or max(self._rates[-SLOW_FOR:]) > SLOW * best:
            return
        self._has_warned = True
        line = (
            f"{rate:,.0f} of {best:,.0f} tokens/s: other work seems to have the cores, and {threads} threads wait for "
            f"each other; Ctrl-C, then the same command with trainer.threads={threads // 2} goes on from here"
        )
        if self._bar is not None:
            self._bar.write(f"{self.name}: {line}", file=self.stream)
        else:
            self._print(line)

    def _values(self) -> str:
        latest = self.measurements.latest
        shown = []
        if "train/loss" in latest:
            shown += [f"loss {latest['train/loss']:.3f}", f"{latest['train/tokens_per_second']:,.0f} tok/s"]
        if "train/mfu" in latest:
            shown.append(f"MFU {latest['train/mfu']:.0%}")
        if "validation/perplexity" in latest:
            shown.append(f"validation ppl {latest['validation/perplexity']:.2f}")
        return "  ".join(shown)

    def _print(self, line: str) -> None:
        print(f"{self.name}: {line}", file=self.stream, flush=True)
