"""What a trained model is measured by."""

from landmark.evaluation.perplexity import evaluate

__all__ = ["evaluate"]
