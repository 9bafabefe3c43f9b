"""Synthetic data: texts made when needed, each as a function of its number, and a corpus of them. Loads no torch."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from landmark.experiment.data.random_numbers import sample_generator
from landmark.experiment.data.tokenizers import Tokenizer

Piece = tuple[str, float]
"""A piece of text, and the weight of its loss."""


@dataclass(frozen=True)
class Prompt:
    """The ids that a model reads, and the answer. evidence: tokens [first, stop) that state it, where known."""

    tokens: np.ndarray
    answer: str
    evidence: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TrainingText:
    """What a model reads in training, and should predict after each token. weights: of each target's loss; 0: none."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class SyntheticData:
    """Makes texts. sample_settings, prompt_settings: all that decides training texts, and prompts, for identities."""

    name: str
    sample_settings: dict[str, Any]
    prompt_settings: dict[str, Any]

    def window(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> TrainingText:
        """A training text of `length` tokens."""
        raise NotImplementedError

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """A prompt of at most `length` tokens. Raises UserError if `length` is too short for any prompt."""
        raise NotImplementedError

    def score(self, text: str, answer: str) -> float:
        """How much of the answer a generated text gives, 0…1."""
        raise NotImplementedError


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the pieces, each encoded by itself, and the weight of each id."""
    encoded = [(tokenizer.encode(text).astype(np.int64), weight) for text, weight in pieces]
    ids = np.concatenate([ids for ids, _ in encoded])
    return ids, np.concatenate([np.full(len(ids), weight) for ids, weight in encoded])


def filled(length: int, eot: int, text_for: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> TrainingText:
    """A window of texts, each closed by end of text, the last cut. text_for: ids and weights, given the free tokens."""
    ids, weights = np.zeros(0, np.int64), np.zeros(0)
    while (room := length - len(ids)) > 0:
        more, their_weights = text_for(room)
        ids, weights = np.concatenate([ids, more, [eot]]), np.concatenate([weights, their_weights, [0.0]])
    tokens, targets = ids[:length], np.append(ids, eot)[1 : length + 1]
    return TrainingText(tokens, targets, np.where(tokens == eot, 0.0, np.append(weights, 0.0)[1 : length + 1]))


@dataclass(frozen=True)
class SyntheticSplit:
    """The part of a `Stream` that identities of runs and rows need."""

    sha256: str


class SyntheticCorpus:
    """Synthetic data with the attributes of a `Corpus` that the rest of the program reads."""

    def __init__(self, data: SyntheticData, tokenizer: Tokenizer):
        self.data, self.tokenizer = data, tokenizer
        self.folder = f"{data.name} (made as needed)"
        self.manifest: dict[str, Any] = {"splits": {}}

    def split(self, name: str) -> SyntheticSplit:
        settings = self.data.sample_settings if name == "train" else self.data.prompt_settings
        described = [self.data.name, name, settings, self.tokenizer.hash]
        if self.tokenizer.beginning:
            described.append(self.tokenizer.beginning)
        text = json.dumps(described, sort_keys=True)
        return SyntheticSplit(hashlib.sha256(text.encode()).hexdigest())

    def prompts(self, split: str, length: int, count: int) -> list[Prompt]:
        """The split's first `count` prompts of at most `length` tokens. Raises UserError if that is too short."""
        beginning, prompts = np.array(self.tokenizer.beginning, dtype=np.int64), []
        for number in range(count):
            generator = sample_generator(split, length, number)
            prompt = self.data.prompt(generator, length - len(beginning), self.tokenizer)
            evidence = tuple((first + len(beginning), stop + len(beginning)) for first, stop in prompt.evidence)
            prompts.append(Prompt(np.concatenate([beginning, prompt.tokens]), prompt.answer, evidence))
        return prompts
