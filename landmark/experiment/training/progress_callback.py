"""The callback that shows the progress of a training: a bar, without a terminal every 15 seconds."""

import sys
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT

from landmark.experiment.training.lightning_module import ends_step
from landmark.experiment.training.measurement_callback import MeasurementCallback
from landmark.utils.progress import new_bar


class ProgressCallback(Callback):
    """Shows step, loss, tokens/s and the remaining time, for the first device only."""

    def __init__(self, measurements: MeasurementCallback, name: str) -> None:
        self.measurements = measurements
        self.name = name
        self._bar: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            steps, done = self.measurements.steps, trainer.global_step
            again = f", going on at step {done}" if done else ""
            print(f"{self.name}: training for {steps} steps{again}", file=sys.stderr, flush=True)
            self._bar = new_bar(self.name, total=steps, initial=done, unit="step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None and ends_step(trainer, batch_idx):
            self._bar.set_postfix_str(self._values(), refresh=False)
            self._bar.update()

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
