"""Kinds of measurement. A perplexity of text, one of copies and an accuracy are never compared with each other."""

from collections.abc import Mapping
from typing import Any

TEXT = "text"
_BY_RESULT = {
    "accuracy": "answers",  # to prompts
    "second_copy": "copies",  # the probe `copy`
}
KINDS = (TEXT, *_BY_RESULT.values(), "hidden")


def kind_of(results: Mapping[str, Any]) -> str:
    """What the results of a row measure: "text", or another of `KINDS`; "hidden": the hidden tokens of a text."""
    otherwise = TEXT if "bits_per_byte" in results or "perplexity" not in results else "hidden"
    return next((kind for key, kind in _BY_RESULT.items() if key in results), otherwise)
