"""Synthetic data: samples and prompts that are made when needed, each as a function of its number."""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from landmark.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

Piece = tuple[str, float]
"""A piece of text, and the weight of its loss."""


@dataclass(frozen=True)
class Prompt:
    """The token ids that a model reads, and the answer that it should give.

    evidence: tokens [first, stop) that state the answer, where it is known which.
    """

    tokens: np.ndarray
    answer: str
    evidence: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TrainingText:
    """What a model reads in training, and what it should predict after each token. All are of one length.

    weights: of the loss of each target; 0: no loss.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class SyntheticData:
    """Makes texts.

    sample_settings, prompt_settings: everything that decides training samples, and prompts, for the identities of runs
    and rows.
    """

    name: str
    sample_settings: dict[str, Any]
    prompt_settings: dict[str, Any]

    def sample(self, rng: np.random.Generator, length: int) -> Iterable[Piece]:
        """Pieces of a training text, of at least `length` bytes unless the text ends before."""
        raise NotImplementedError

    def window(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> TrainingText:
        """The first `length` tokens of a training text, padded with end of text."""
        return training_text(*encode(self.sample(rng, length), tokenizer), length, tokenizer.eot)

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """A prompt of at most `length` tokens. Raises UserError if `length` is too short for any prompt."""
        raise NotImplementedError

    def check(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> None:
        """Raise UserError if `length` tokens are too few for an evaluation."""
        self.prompt(rng, length, tokenizer)

    def answered(self, text: str, answer: str) -> bool:
        """Whether a generated text gives the answer."""
        raise NotImplementedError

    def score(self, text: str, answer: str) -> float:
        """How much of the answer a generated text gives, 0…1."""
        return int(self.answered(text, answer))


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the pieces, each encoded by itself, and the weight of each id."""
    encoded = [(tokenizer.encode(text).astype(np.int64), weight) for text, weight in pieces]
    ids = np.concatenate([ids for ids, _ in encoded])
    return ids, np.concatenate([np.full(len(ids), weight) for ids, weight in encoded])


def training_text(ids: np.ndarray, weights: np.ndarray, length: int, eot: int) -> TrainingText:
    """A text of `length` tokens, each followed by the next. ids, weights: (N,); end of text pads a shorter one."""
    padding = max(0, length + 1 - len(ids))
    ids = np.concatenate([ids, np.full(padding, eot)])
    weights = np.concatenate([weights, np.zeros(padding)])
    return TrainingText(ids[:length], ids[1 : length + 1], np.where(ids[:length] == eot, 0.0, weights[1 : length + 1]))


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits. 0 must fit, and every number below one that fits."""
    return bisect.bisect(range(1, limit + 1), False, key=lambda number: not fits(number))


def too_short(name: str, length: int, least: int) -> UserError:
    """The error for prompts that do not fit into `length` tokens."""
    return UserError(f"eval.length={length}: a {name} prompt needs at least {least} tokens")
