"""Tasks whose samples and prompts are made when they are needed, each a function of its number. Loads no torch."""

import bisect
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from landmark.data.corpora import SPLITS
from landmark.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.data.samples import SampleWindows

Piece = tuple[str, float]
"""Some text and the weight of its loss."""


@dataclass(frozen=True)
class Prompt:
    """What a model reads, and the answer that it should give."""

    tokens: np.ndarray
    answer: str


class Task(Protocol):
    """Makes texts. `settings` decide the training samples, `reading` the prompts too."""

    name: str
    settings: dict[str, Any]
    reading: dict[str, Any]

    def sample(self, rng: np.random.Generator, length: int) -> Iterable[Piece]:
        """Pieces of a training text, of at least `length` bytes where the task does not end before."""
        ...

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """A prompt of at most `length` tokens. Raises UserError where no prompt is so short."""
        ...

    def answered(self, text: str, answer: str) -> bool:
        """Whether a generated text gives the answer."""
        ...


@dataclass(frozen=True)
class SyntheticSplit:
    """Stands for a stream in the identity of runs and rows."""

    sha256: str


class SyntheticCorpus:
    """A task as the rest of the program sees a corpus."""

    def __init__(self, task: Task, tokenizer: Tokenizer):
        self.task, self.tokenizer = task, tokenizer
        self.folder = f"{task.name} (made as needed)"
        self.manifest: dict[str, Any] = {"splits": {}}

    def split(self, name: str) -> SyntheticSplit:
        settings = self.task.settings if name == "train" else self.task.reading
        text = json.dumps([self.task.name, name, settings, self.tokenizer.hash], sort_keys=True)
        return SyntheticSplit(hashlib.sha256(text.encode()).hexdigest())

    def windows(self, split: str, **settings: Any) -> "SampleWindows":
        """Windows to train on; settings as those of `landmark.data.samples.SampleWindows`."""
        from landmark.data.samples import SampleWindows

        return SampleWindows(self.task, self.tokenizer, split, **settings)

    def prompts(self, split: str, length: int, count: int) -> list[Prompt]:
        """The split's first `count` prompts of at most `length` tokens."""
        return [self.task.prompt(random(split, length, n), length, self.tokenizer) for n in range(count)]


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the pieces, each encoded by itself, and the weight of each id."""
    encoded = [(tokenizer.encode(text).astype(np.int64), weight) for text, weight in pieces]
    ids = np.concatenate([ids for ids, _ in encoded])
    return ids, np.concatenate([np.full(len(ids), weight) for ids, weight in encoded])


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, where 0 does and all below one that does."""
    return bisect.bisect(range(1, limit + 1), False, key=lambda number: not fits(number))


def too_short(task: str, length: int, least: int) -> UserError:
    return UserError(f"eval.length={length}: a {task} prompt needs at least {least} tokens")


def random(split: str, *numbers: int) -> np.random.Generator:
    """A generator for one sample; the splits never share one."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([SPLITS.index(split), *numbers])))
