"""Micro-batches: parts of the batch of an optimizer step, whose gradients Lightning adds up."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning import Trainer


def micro_batches(batch_size: int, micro_batch: int | None, devices: int) -> int:
    """Number of parts that each device cuts its share of a batch into. micro_batch: windows of a part (None: all)."""
    return 1 if micro_batch is None else math.ceil(batch_size // devices / micro_batch)


def ends_step(trainer: "Trainer", batch_idx: int) -> bool:
    """Whether the optimizer has taken a step after this micro-batch, which Lightning's hooks call a batch."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0
