"""Is the answer in the text? A measure that is no share among passages, and its words. It needs no pass of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from landmark.reading.answer import Answer
from landmark.reading.sources import Found

TOKENS = 24  # of an answer that are looked at: those that were measured
# Of the log odds that an answer is right and in the text: the constant; the log of its least probable token's
# probability; the share of its own words that stand in the passages; BM25 of the best block for the question. These and
# the next line were chosen in experiments/sources, on two thirds of 120 questions.
WEIGHTS = (-1.86, 1.33, 2.63, 0.11)
WEAK, CLEAR = 0.15, 0.3  # least scores
SAID = {
    "none": "nothing in the text resembles this question and its answer",
    "weak": "weak, the passages hardly say this",
    "clear": "clear, the passages say something like it: read them",
}


class Support(NamedTuple):
    """How far an answer is in the text. score: from 0 to 1. level: none, weak or clear. said: the level in words.
    least, own, words: what the score is made of, as of `support_of`.
    """

    score: float
    level: str
    said: str
    least: float
    own: float
    words: float


def support(found: Found, answer: Answer) -> Support | None:
    """How far an answer that was made from passages is in them; None where there were none. answer: with nats."""
    if not (found.text and answer.tokens and answer.nats):
        return None
    return support_of(*values_of(found, answer))


def values_of(found: Found, answer: Answer) -> tuple[float, float, float]:
    """What `support_of` takes."""
    first = answer.tokens[:TOKENS]
    assert answer.nats is not None
    return min(answer.nats[: len(first)]), own_words(answer.decode(first), found.question, found.text), found.words


def support_of(least: float, own: float, words: float) -> Support:
    """As `support`. least: nats of the least probable token. own: as of `own_words`. words: of `Found`."""
    values = 1.0, least, own, words
    score = 1 / (1 + math.exp(-sum(weight * value for weight, value in zip(WEIGHTS, values, strict=True))))
    level = "none" if score < WEAK else "weak" if score < CLEAR else "clear"
    return Support(round(score, 3), level, SAID[level], *(round(each, 4) for each in (least, own, words)))


def own_words(answer: str, question: str, passages: str) -> float:
    """The share of an answer's words that stand in the passages, of those that the question has not; 0: it has none.
    English stop words, and an *s* at the end, do not count.
    """
    said, asked, read = _stems([answer, question, passages])
    own = said - asked
    return len(own & read) / len(own) if own else 0.0


def _stems(texts: Sequence[str]) -> list[set[str]]:
    import bm25s

    tokenize: Any = bm25s.tokenize
    words = tokenize([*texts], stopwords="en", show_progress=False, return_ids=False)
    return [{word.removesuffix("s") for word in each} for each in words]
