"""The callback that measures a training, and ends one whose loss or weights are no longer finite."""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from landmark.experiment.training.lightning_module import STEP_LOSS, LanguageModelTraining, ends_step
from landmark.experiment.training.sharding import is_sharded, own_share
from landmark.utils.checkpoints import checkpoints
from landmark.utils.errors import Diverged
from landmark.utils.hardware import peak_memory_bytes
from landmark.utils.metrics_csv import append_metrics, drop_lines_after

RISE = 0.01  # of the validation loss above its lowest, as a share, that is no noise
_log = logging.getLogger(__name__)


class MeasurementCallback(Callback):
    """Measures and validates at fixed steps; after resuming too, as Lightning's own validation would not."""

    def __init__(
        self,
        *,
        steps: int,
        log_every: int,
        validate_every: int,
        tokens_per_step: int,
        flops_per_token: float,
        others: Sequence[Callback] = (),
    ) -> None:
        """tokens_per_step: on all devices, landmarks included. others: callbacks that are told of validations."""
        self.others = others
        self.steps = steps
        self.log_every = log_every
        self.validate_every = validate_every
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops: float | None = None  # FLOP/s of all devices, where they are known
        self.latest: dict[str, float] = {}  # the last value of each logged metric
        self._losses: list[float] = []  # losses since the last training row, nats per target
        self._unread: list[Tensor] = []  # losses after these, still on the device
        self._clock = _Clock()
        self._seconds_logged = 0.0
        self._earlier_peak = 0
        self._gradient_norm = torch.zeros(())
        self._best: dict[str, float] = {}  # losses and step where the validation loss was lowest
        self._has_warned = False

    def summary(self) -> dict[str, float | int | None]:
        """Measurements of the whole training, from before resuming too: see `training.fit.train`."""
        rate = self.steps * self.tokens_per_step / max(self._clock.seconds, 1e-9)
        return {
            "steps": self.steps,
            "train_loss": self.latest.get("train/loss"),
            "validation_loss": self.latest.get("validation/loss"),
            "validation_perplexity": self.latest.get("validation/perplexity"),
            "seconds": self._clock.seconds,
            "tokens_per_second": rate,
            "mfu": rate * self.flops_per_token / self.peak_flops if self.peak_flops else None,
            "peak_memory_bytes": max(self._earlier_peak, peak_memory_bytes()),
            "flops_per_token": self.flops_per_token,
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            drop_lines_after(_metrics(trainer), trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._is_logged(trainer.global_step + 1):
            self._gradient_norm = gradient_norm(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        assert isinstance(outputs, dict)
        self._unread.append(outputs[STEP_LOSS])
        step = trainer.global_step
        row: dict[str, float] = {}
        if self._is_logged(step):
            row |= self._measure(trainer)
        if step % self.validate_every == 0 or step == self.steps:
            row |= self._validate(trainer, pl_module)
        for key, value in row.items() if self.others else ():
            pl_module.log(key, value, logger=False, on_step=True, on_epoch=False)
        for hook in ("on_validation_start", "on_validation_end") if "validation/loss" in row else ():
            for other in self.others:
                getattr(other, hook)(trainer, pl_module)
        if trainer.should_stop and not self._is_logged(step):
            row |= self._measure(trainer)
        if row:
            self.latest |= row
            if trainer.is_global_zero:
                append_metrics(_metrics(trainer), step, row)
            if "validation/loss" in row and "train/loss" in self.latest:
                self._warn_of_a_rise(trainer, step)
            for logger in trainer.loggers:
                logger.log_metrics(row, step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._read_losses(trainer)
        finite = torch.stack([own_share(parameter).isfinite().all() for parameter in pl_module.parameters()]).all()
        if not trainer.strategy.reduce_boolean_decision(bool(finite), all=True):
            check_finite(trainer, "a weight", [math.nan], trainer.global_step)  # its loss was finite
        checkpoint["measurements"] = {
            "latest": dict(self.latest),
            "losses": list(self._losses),
            "seconds": self._clock.seconds,
            "seconds_logged": self._seconds_logged,
            "peak_memory": max(self._earlier_peak, peak_memory_bytes()),
            "best": dict(self._best),
            "has_warned": self._has_warned,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["measurements"]
        self.latest = dict(saved["latest"])
        self._losses = list(saved["losses"])
        self._clock = _Clock(saved["seconds"])
        self._seconds_logged = saved["seconds_logged"]
        self._earlier_peak = saved["peak_memory"]
        self._best, self._has_warned = dict(saved.get("best", {})), saved.get("has_warned", False)

    def _warn_of_a_rise(self, trainer: Trainer, step: int) -> None:
        """Say once that the validation loss rises while the training loss falls."""
        now, best = {**self.latest, "step": step}, self._best
        if not best or now["validation/loss"] < best["validation/loss"]:
            self._best = {name: now[name] for name in ("step", "train/loss", "validation/loss")}
            return
        is_higher = now["validation/loss"] > (1 + RISE) * best["validation/loss"]
        if is_higher and now["train/loss"] < best["train/loss"] and not self._has_warned:
            self._has_warned = True
            if trainer.is_global_zero:
                _log.warning(
                    "step %d: the validation loss rose from %.3f (step %d) to %.3f, while the training loss fell from "
                    "%.3f to %.3f: the model learns its text by heart; train with more text, or stop at fewer "
                    "train.steps",
                    *(step, best["validation/loss"], best["step"], now["validation/loss"]),
                    *(best["train/loss"], now["train/loss"]),
                )

    def _is_logged(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.steps

    def _read_losses(self, trainer: Trainer) -> None:
        """Wait for the steps so far, read their losses, and stop the clock until the next step begins."""
        if self._unread:
            losses = trainer.strategy.reduce(torch.stack(self._unread), reduce_op="mean")
            assert isinstance(losses, Tensor)
            values: list[float] = losses.tolist()
            check_finite(trainer, "the loss", values, trainer.global_step - len(values) + 1)
            self._losses += values
            self._unread.clear()
        self._clock.stop()

    def _measure(self, trainer: Trainer) -> dict[str, float]:
        self._read_losses(trainer)
        rate = len(self._losses) * self.tokens_per_step / max(self._clock.seconds - self._seconds_logged, 1e-9)
        row = {
            "train/loss": math.fsum(self._losses) / len(self._losses),
            "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "train/gradient_norm": self._gradient_norm.item(),
            "train/tokens_per_second": rate,
            "train/seconds": self._clock.seconds,
            "train/peak_memory_bytes": max(self._earlier_peak, peak_memory_bytes()),
        }
        if self.peak_flops:
            row["train/mfu"] = rate * self.flops_per_token / self.peak_flops
        self._losses.clear()
        self._seconds_logged = self._clock.seconds
        return row

    def _validate(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        """Mean loss over the data module's validation batches, which the devices share."""
        assert isinstance(module, LanguageModelTraining)
        self._read_losses(trainer)
        total, targets = 0.0, 0
        module.eval()
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            for batch in trainer.datamodule.val_dataloader():  # pyright: ignore[reportAttributeAccessIssue]
                sums = module.validation_step(trainer.strategy.batch_to_device(batch))
                total += sums["loss"].item()
                targets += int(sums["targets"])
        module.train()
        total_targets = trainer.strategy.reduce(
            torch.tensor([total, targets], dtype=torch.float64, device=module.device), reduce_op="sum"
        )
        assert isinstance(total_targets, Tensor)
        loss = (total_targets[0] / total_targets[1]).item()
        check_finite(trainer, "the validation loss", [loss], trainer.global_step)
        return {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 700.0))}


def gradient_norm(trainer: Trainer, module: LightningModule) -> Tensor:
    """Euclidean norm of the gradients of a whole batch, on the device; with `trainer=fsdp` over all devices' shares."""
    gradients = [own_share(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(module.device)
    if is_sharded(module):
        total = trainer.strategy.reduce(norm.square(), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total.sqrt()
    return norm


def _metrics(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "metrics.csv"


class _Clock:
    """Sums up the seconds between each `start` and `stop`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        self._seconds, self._since = self.seconds, None


def check_finite(trainer: Trainer, what: str, values: list[float], first: int) -> None:
    """Raise Diverged for the first value that is not finite; the values are of the steps from `first` on."""
    for step, value in enumerate(values, first):
        if not math.isfinite(value):
            before = next(iter(checkpoints(Path(trainer.default_root_dir) / "checkpoints")), None)
            kept = f"the checkpoint before it is {before}" if before else "no checkpoint was written before"
            raise Diverged(
                f"diverged: {what} became {value} at step {step}; {kept}: lower train.max_lr, or train with "
                "train.precision=32-true"
            )
