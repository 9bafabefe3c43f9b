"""Measurements of a trained model. Torch is loaded when a name is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landmark.evaluation.perplexity import evaluate as evaluate
    from landmark.evaluation.probes import evaluate_copy as evaluate_copy
    from landmark.evaluation.recall import evaluate_recall as evaluate_recall

_MODULES = {
    "evaluate": "perplexity",
    "evaluate_copy": "probes",
    "evaluate_recall": "recall",
}
__all__ = ["evaluate", "evaluate_copy", "evaluate_recall"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"landmark.evaluation.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
