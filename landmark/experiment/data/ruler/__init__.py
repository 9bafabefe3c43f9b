"""Tasks of RULER (Hsieh et al. 2024) with the prompts of NVIDIA/RULER; essays and words are of the corpus at hand."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from landmark.experiment.data.ruler.material import KEYS, Essays, Material
from landmark.experiment.data.ruler.tasks import CommonWords, FrequentWords, Needles, Sample, Task, Variables
from landmark.experiment.data.synthetic import Prompt, SyntheticData
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.constants import RULER_VERSION
from landmark.utils.errors import UserError

TASKS: dict[str, Task] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", numbers=False),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", words=False, numbers=False),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}


class Ruler(SyntheticData):
    """Prompts of one task. The text is the largest, up to one part in 64, for which prompt and answer fit; one of
    frequent or common words, whose tokens are not in proportion to its size, is up to a fourteenth shorter.
    """

    name = "ruler"

    def __init__(self, task: str, generated: int, essays: Essays, made: Task | None = None):
        """task: one of `TASKS`. generated: tokens left for the answer. essays: for texts. made: other samples."""
        self.task, self.generated, self.essays = made or TASKS[task], generated, essays
        self.prompt_settings: dict[str, Any] = {"task": task, "version": RULER_VERSION}
        self.sample_settings = self.prompt_settings
        self._tokens = functools.cache(self._measure)

    def prompt(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> Prompt:
        """A prompt that leaves room for the answer within `length` tokens. Its answers are parted by spaces."""
        seed, room = int(rng.integers(1 << 62)), length - self.generated
        size = self.size(length, tokenizer)
        while True:
            sample = self.make(random.Random(seed), size, length)
            tokens, ends = tokenizer.encode_with_ends(sample.text)
            if len(tokens) <= room or size == self.task.least:
                break
            size = max(self.task.least, size - max(1, size // 64))
        if len(tokens) > room:
            name, least = self.prompt_settings["task"], len(tokens) + self.generated
            raise UserError(f"eval.length={length}: a {name} prompt needs at least {least} tokens")
        return Prompt(tokens.astype(np.int64), " ".join(sample.answers), evidence_ranges(sample, ends))

    def make(self, rng: random.Random, size: int, length: int, first: int = 0) -> Sample:
        """A sample, as of `Task`. first: word of the essay to begin with."""
        return self.task.make(rng, size, length, self.material(size, first))

    def material(self, size: int, first: int = 0) -> Material:
        """What a text of some size is made of."""
        in_essay = isinstance(self.task, Needles) and self.task.haystack == "essay"
        essay = self.essays.words(first, size) if in_essay else []
        words = self.essays.vocabulary if isinstance(self.task, CommonWords) else []
        return Material(KEYS, words, essay)

    def score(self, text: str, answer: str) -> float:
        """The share of the answers that are in the text, in lower case (RULER's string_match_all)."""
        answers = answer.lower().split()
        return sum(each in text.lower() for each in answers) / len(answers)

    def size(self, length: int, tokenizer: Tokenizer) -> int:
        """The size of texts for a length, found by search."""
        room = length - self.generated
        return largest_size(lambda size: self._tokens(size, length, tokenizer), room, self.task.least)

    def fits(self, length: int, tokenizer: Tokenizer) -> bool:
        """Whether a text of the least size, with its answer, fits into a length."""
        return self._tokens(self.task.least, length, tokenizer) <= length - self.generated

    def _measure(self, size: int, length: int, tokenizer: Tokenizer) -> int:
        """Tokens of a text of a size with its answer."""
        sample = self.make(random.Random(0), size, length)
        return len(tokenizer.encode(f"{sample.text} {self.task.reply(sample.answers)}"))


def largest_size(measure: Callable[[int], int], room: int, least: int) -> int:
    """The largest size from `least` on, up to one part in 64, whose measure in tokens is at most `room`; or `least`."""
    low, high = least, 2 * least + 8
    while measure(high) <= room:
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if measure(middle) <= room else (low, middle)
    return low


def evidence_ranges(sample: Sample, ends: np.ndarray) -> tuple[tuple[int, int], ...]:
    """For each part that states an answer, its tokens [first, stop). ends: (n,), the byte at which each token ends."""
    found = []
    for part in sample.evidence:
        start = len(sample.text[: sample.text.index(part)].encode())
        stop = start + len(part.encode())
        found.append((int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, stop, "left")) + 1))
    return tuple(found)
