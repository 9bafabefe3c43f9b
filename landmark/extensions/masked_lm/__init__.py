"""Masked language modelling in both directions (paper, Appendix F). Torch is loaded when it is used."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.data import Tokenizer
    from landmark.extensions.masked_lm.tokens import MaskedTokens

SETTINGS = ("model.masked",)


def check(config: Config) -> None:
    """Raise UserError for settings that have no effect on a model that reads whole texts of a corpus, and no memory."""
    from landmark.config import SYNTHETIC

    check_model(config.model.kind, config.cmt.enabled, config.model.backend)
    of_text = ("data.tasks", config.data.tasks), ("data.passkeys", config.data.passkeys)
    measured = [(f"eval.{key}", getattr(config.eval, key)) for key in ("task", "retriever")]
    chunks = ("train.local", config.train.local), ("eval.local", resolved(config).eval.local != config.eval.length)
    kept = [
        (f"{group}.{item.name}", value != item.default and value)
        for group in ("memory", "retrieval")
        for item in fields(getattr(config, group))
        if (value := getattr(getattr(config, group), item.name)) is not None and item.name != "k"
    ]
    for key, value in (*of_text, *measured, *chunks, *kept):
        if value:
            raise UserError(f"{key}: has no effect on model.masked=true, which reads whole texts, without a memory")
    if config.data.name in SYNTHETIC or config.task in ("generate", "inspect"):
        raise UserError(f"model.masked=true: is for text of a corpus, not data={config.data.name} task={config.task}")
    if config.model.kind == "landmark" and config.retrieval.k < 1:
        raise UserError(f"retrieval.k={config.retrieval.k}: must be at least 1 for a masked model")


def check_model(kind: str, cmt: bool, backend: str) -> None:
    """Raise UserError for a kind of model, a context miss token or a backend that reads in one direction."""
    if kind == "transformer_xl" or cmt or backend == "triton":
        raise UserError(f"model.masked=true: model={kind}, cmt={cmt}, model.backend={backend} read in one direction")


def resolved(config: Config) -> Config:
    """A text is read at once."""
    if config.eval.local is not None:
        return config
    return replace(config, eval=replace(config.eval, local=config.eval.length))


def row_settings(config: Config) -> dict[str, Any]:
    """The part of a row's identity."""
    return {"masked": True}


def keys_per_query(length: int) -> float:
    """A query attends in both directions."""
    return length


def window_data(config: Config, tokenizer: Tokenizer) -> MaskedTokens:
    """Training and validation windows with hidden tokens."""
    from landmark.extensions.masked_lm.tokens import masked_tokens

    return masked_tokens(tokenizer)


def evaluate(*arguments: Any) -> dict[str, Any]:
    """See `landmark.extensions.masked_lm.evaluation`."""
    from landmark.extensions.masked_lm.evaluation import evaluate_masked

    return evaluate_masked(*arguments)


def __getattr__(name: str) -> Any:
    if name == "Model":
        from landmark.extensions.masked_lm.model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
