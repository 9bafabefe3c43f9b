"""A question about a long text, as all tasks of RULER make it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Question:
    """A text that ends in a question and the beginning of its answer.

    answers: what the answer must contain. evidence: parts of the text that state the answers, as they stand there; none
    where no single part does.
    """

    text: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Material:
    """What texts are made of. keys: of needles. words: of lists of words. essay: the words of an essay, in order."""

    keys: Sequence[str]
    words: Sequence[str]
    essay: Sequence[str]


class Task(Protocol):
    """A kind of question. least: the smallest size of a text."""

    @property
    def least(self) -> int: ...

    def question(self, rng: random.Random, size: int, length: int, material: Material) -> Question:
        """A question about a text.

        Args:
            rng: draws everything that is random.
            size: of the text, in units of the task: sentences, lines or words.
            length: tokens of the prompt and its answer together.
            material: what the text is made of.
        """
        ...

    def reply(self, answers: Sequence[str]) -> str:
        """The answers as training texts give them."""
        ...
