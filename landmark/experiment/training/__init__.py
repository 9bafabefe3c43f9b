"""Training: one loop for every model, which resumes from its last checkpoint."""

from landmark.experiment.training.checkpointing import discard_checkpoints
from landmark.experiment.training.fit import train

__all__ = ["discard_checkpoints", "train"]
