"""The callback that shows the progress of a training: a bar on a terminal, elsewhere a line every 15 seconds."""

import sys
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from tqdm import tqdm

from landmark.training.lightning_module import ends_step
from landmark.training.measurement_callback import MeasurementCallback
from landmark.utils.progress import terminal_size

SECONDS_BETWEEN_LINES = 15.0


class ProgressCallback(Callback):
    """Shows step, loss, tokens/s and the remaining time, for the first device only."""

    def __init__(self, measurements: MeasurementCallback, name: str) -> None:
        self.measurements = measurements
        self.name = name
        self._bar: tqdm | None = None
        self._shown = 0.0
        self._began = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._shown = time.monotonic()
        self._first_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        if sys.stderr.isatty():
            steps, done = self.measurements.steps, trainer.global_step
            self._bar = tqdm(desc=self.name, total=steps, initial=done, unit="step", **terminal_size())
        else:
            again = f", going on at step {trainer.global_step}" if trainer.global_step else ""
            self._print(f"training for {self.measurements.steps} steps{again}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or not ends_step(trainer, batch_idx):
            return
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
        print(f"{self.name}: {line}", file=sys.stderr, flush=True)
