"""The Lightning module that trains every model."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from landmark.experiment.training.optimization import make_optimizer, set_learning_rate
from landmark.experiment.training.sharding import shard
from landmark.utils.constants import NO_LOSS
from landmark.utils.window_batch import WindowBatch

if TYPE_CHECKING:
    from landmark.experiment.config.schema import TrainConfig
    from landmark.models import LanguageModel

STEP_LOSS = "step_loss"  # in the output of a training step


def ends_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the optimizer has taken a step after this micro-batch, which Lightning's hooks call a batch."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class LanguageModelTraining(LightningModule):
    """Trains `model` on effective batches, which are cut into micro-batches, and by some models into windows.

    The loss is the mean over the targets of the whole batch on all devices. With one window Lightning optimises after
    `accumulate_grad_batches`; with several a step is a batch, with backward on each window before the next is read.
    """

    def __init__(self, model: "LanguageModel", train: "TrainConfig", windows: int = 1) -> None:
        """windows: number of losses of a training batch, one a window."""
        super().__init__()
        self.automatic_optimization = windows == 1
        self.model = model
        self.train_settings = train
        self.windows = windows
        self._scale = self._step_loss = torch.zeros(())

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.train_settings)

    def training_step(self, batch: WindowBatch, batch_idx: int) -> dict[str, Tensor]:
        """The `loss` of a micro-batch; with several windows none. STEP_LOSS: this device's share × devices, nats."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._scale = self._devices_over_targets(batch)
            self._step_loss = torch.zeros((), device=self.device)
        if not self.automatic_optimization:
            self._train_on_windows(batch)
            return {STEP_LOSS: self._step_loss * self._scale}
        ((loss, _),) = self.model.window_losses(batch)
        self._step_loss = self._step_loss + loss.detach()
        return {"loss": loss * self._scale, STEP_LOSS: self._step_loss * self._scale}

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Lightning divides the loss by the number of micro-batches; this gradient takes it back, without rounding."""
        with self._mixed_precision():
            loss.backward(torch.full_like(loss, self.trainer.accumulate_grad_batches), *args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take a step, and free the gradients, whose memory the next forward pass needs."""
        set_learning_rate(optimizer.param_groups, self.global_step, self.train_settings)
        with self._mixed_precision():
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def validation_step(self, batch: WindowBatch) -> dict[str, Tensor]:
        """The summed `loss` in nats and the number of `targets` of one batch, on this device."""
        losses = torch.zeros((), device=self.device)
        for micro_batch in batch.cut(self.train_settings.micro_batch):
            for loss, _ in self.model.window_losses(micro_batch):
                losses = losses + loss
        return {"loss": losses, "targets": (batch.targets != NO_LOSS).sum()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Count micro-batches and steps anew: with another number of devices a step has another number of parts."""
        step, loops = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
        parts = step * self.trainer.accumulate_grad_batches
        steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        for span in ("total", "current"):
            seen = {"ready": parts, "started": parts, "processed": parts, "completed": parts - 1}
            loops["epoch_loop.batch_progress"][span] = seen
            steps[span] = {"ready": step, "completed": step}

    def _mixed_precision(self) -> AbstractContextManager[None]:
        """The context of the whole step, in which manual optimisation runs, too: it decides how sums are rounded."""
        return self.trainer.precision_plugin.train_step_context()

    def _devices_over_targets(self, batch: WindowBatch) -> Tensor:
        """The factor of summed losses: DistributedDataParallel averages gradients of devices, but the loss is a sum."""
        own = batch.batch_targets
        count = (batch.targets != NO_LOSS).sum() if own is None else torch.tensor(own, device=self.device)
        targets = self.trainer.strategy.reduce(count, reduce_op="sum")
        assert isinstance(targets, Tensor)
        return self.trainer.world_size / targets.clamp(min=1)

    def _train_on_windows(self, batch: WindowBatch) -> None:
        """Take an optimizer step on a batch with several windows."""
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        assert not isinstance(optimizer, list)
        set_learning_rate(optimizer.param_groups, self.global_step, self.train_settings)
        parts = list(batch.cut(self.train_settings.micro_batch))
        remaining = len(parts) * self.windows
        for micro_batch in parts:
            for loss, _ in self.model.window_losses(micro_batch):
                remaining -= 1
                parallel = isinstance(strategy, ParallelStrategy)
                with strategy.block_backward_sync() if parallel and remaining else nullcontext():
                    self.manual_backward(loss * self._scale)
                self._step_loss = self._step_loss + loss.detach()
        if remaining:
            raise RuntimeError(f"the model did not yield {self.windows} windows, {remaining} are missing")
        optimizer.step()
        optimizer.zero_grad()
