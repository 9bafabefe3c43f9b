"""Training: one loop for every model, which resumes from its last checkpoint."""

from landmark.training.checkpointing import discard_checkpoints
from landmark.training.fit import train

__all__ = ["discard_checkpoints", "train"]
