"""Is the answer in the text? A measure that is no share among the passages, and its words."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

from landmark.reading.answer import Answer
from landmark.reading.answering import Answering
from landmark.reading.sources import Found

# Of the probability that an answer is right and in the text: of its constant, of the mean nats of its tokens behind the
# passages, of how many of these the passages add, and of the best block's BM25. Chosen in experiments/sources.
WEIGHTS = (0.0, 1.0, 1.0, 0.1)
WEAK, CLEAR = 0.15, 0.5  # least scores
SAID = {
    "none": "nothing in the text resembles this question",
    "weak": "weak: read the passages, the answer may not be there",
    "clear": "clear: the passages say this, as far as a model can tell",
}


class Support(NamedTuple):
    """How far an answer is in the text. score: from 0 to 1. level: none, weak or clear. said: the level in words."""

    score: float
    level: str
    said: str


def support(
    answering: Answering, found: Found, alone: Sequence[int], answer: Answer, gone: threading.Event | None = None
) -> Support | None:
    """How far an answer that was made from passages is in them; None where there were none. alone: ids of the same
    prompt without a text. answer: with nats.

    An answer that the model gives as readily without the text is not from it. Raises Gone.
    """
    if not (found.text and answer.tokens and answer.nats):
        return None
    own = answering.nats_of(alone, answer.tokens, gone)
    return support_of(answer.nats[: len(own)], own, found.words)


def support_of(behind: Sequence[float], alone: Sequence[float], words: float) -> Support:
    """As `support`. behind, alone: nats of the tokens behind the passages, and without a text. words: of `Found`."""
    mean = sum(behind) / len(behind)
    values = 1.0, mean, mean - sum(alone) / len(alone), words
    score = 1 / (1 + math.exp(-sum(weight * value for weight, value in zip(WEIGHTS, values, strict=True))))
    level = "none" if score < WEAK else "weak" if score < CLEAR else "clear"
    return Support(round(score, 3), level, SAID[level])
