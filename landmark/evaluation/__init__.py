"""What a trained model is measured by. `statistics` needs no torch, so that records can be compared without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.evaluation.perplexity import evaluate as evaluate
    from landmark.evaluation.recall import evaluate_recall as evaluate_recall

__all__ = ["evaluate", "evaluate_recall"]


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        from landmark.evaluation.perplexity import evaluate

        return evaluate
    if name == "evaluate_recall":
        from landmark.evaluation.recall import evaluate_recall

        return evaluate_recall
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
