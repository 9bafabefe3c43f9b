"""The Lightning module that trains every model."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from landmark.training.optimization import make_optimizer, set_learning_rate
from landmark.utils.constants import NO_LOSS
from landmark.utils.window_batch import WindowBatch

if TYPE_CHECKING:
    from landmark.config.schema import TrainConfig
    from landmark.models import LanguageModel


class LanguageModelTraining(LightningModule):
    """Trains `model` on effective batches, which are cut into micro-batches here, and into windows by the model.

    1. Count the targets of the whole batch on all devices. The loss is the mean over them, however the batch is cut.
    2. Cut the batch into micro-batches. For each, `model.window_losses` yields (summed loss in nats, number of
       targets) window by window. Backward is called on each loss before the next one is computed, so that memory
       holds one window of one micro-batch.
    3. Take one optimizer step.
    """

    def __init__(self, model: "LanguageModel", train: "TrainConfig", windows: int = 1) -> None:
        """windows: number of losses that the model yields for a batch."""
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.train_settings = train
        self.windows = windows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.train_settings)

    def training_step(self, batch: WindowBatch) -> Tensor:
        """Take an optimizer step. Returns this device's share of the loss × devices, in nats per target."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        set_learning_rate(optimizer.param_groups, self.global_step, self.train_settings)

        strategy = self.trainer.strategy
        targets = strategy.reduce((batch.targets != NO_LOSS).sum(), reduce_op="sum")
        assert isinstance(targets, Tensor)
        # DistributedDataParallel averages the gradients of the devices, but the loss needs their sum.
        scale = self.trainer.world_size / targets.clamp(min=1)
        total = torch.zeros((), device=self.device)
        micro_batches = list(self._micro_batches(batch))
        remaining = len(micro_batches) * self.windows
        for micro_batch in micro_batches:
            for loss, _ in self.model.window_losses(micro_batch):
                remaining -= 1
                parallel = isinstance(strategy, ParallelStrategy)
                with strategy.block_backward_sync() if parallel and remaining else nullcontext():
                    self.manual_backward(loss * scale)
                total += loss.detach()
        if remaining:
            raise RuntimeError(f"the model did not yield {self.windows} windows, {remaining} are missing")
        optimizer.step()
        optimizer.zero_grad()
        return total * scale

    def validation_step(self, batch: WindowBatch) -> dict[str, Tensor]:
        """The summed `loss` in nats and the number of `targets` of one batch, on this device."""
        losses = torch.zeros((), device=self.device)
        for micro_batch in self._micro_batches(batch):
            for loss, _ in self.model.window_losses(micro_batch):
                losses += loss
        return {"loss": losses, "targets": (batch.targets != NO_LOSS).sum()}

    def _micro_batches(self, batch: WindowBatch) -> Iterator[WindowBatch]:
        size = self.train_settings.micro_batch or len(batch)
        for start in range(0, len(batch), size):
            yield batch.rows(slice(start, start + size))
