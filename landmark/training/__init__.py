"""Training: one loop for every model, resumed where it stopped."""

from landmark.training.checkpointing import discard_checkpoints
from landmark.training.fit import train

__all__ = ["discard_checkpoints", "train"]
