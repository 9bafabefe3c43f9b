"""What the texts of RULER's tasks are made of: noise, keys, and the text of a split as essays."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Keys are `adjective-noun`: 151 adjectives and 280 nouns, so 42,280 keys. RULER's own words come from the package
# wonderwords; these are others, so that nothing has to be installed.
_ADJECTIVES, _NOUNS = Path(__file__).with_name("words.txt").read_text("utf-8").split("\n\n")
KEYS = sorted(f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split())
_WORD = re.compile(r"[a-z]{3,12}")
_AT_FIRST = 1 << 14  # tokens of an essay that are decoded first


@dataclass(frozen=True)
class Material:
    """What texts are made of. keys: of needles. words: of lists of words. essay: the words of an essay, in order."""

    keys: Sequence[str]
    words: Sequence[str]
    essay: Sequence[str]


class Essays:
    """Words of a stream, decoded as far as they are needed; after its end it begins again."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        """tokens: (N,) ids of the stream. Raises UserError for a stream without words."""
        self._tokens, self._tokenizer = tokens, tokenizer
        self._words: list[str] = []
        self._decoded = 0
        if not self.words(0, 1)[0]:
            raise UserError("eval.task, data.tasks: the split has no words that essays could be made of")

    def words(self, first: int, count: int) -> list[str]:
        """`count` words from number `first` on."""
        while len(self._words) < first + count and self._decoded < len(self._tokens):
            self._decoded = min(max(_AT_FIRST, 4 * self._decoded), len(self._tokens))
            is_whole = self._decoded == len(self._tokens)
            words = self._tokenizer.decode(self._tokens[: self._decoded]).split()
            self._words = words if is_whole else words[:-1]  # whose last one may be cut
        if not self._words:
            return [""] * count
        first %= len(self._words)
        found = self._words[first : first + count]
        while len(found) < count:
            found += self._words[: count - len(found)]
        return found

    @cached_property
    def vocabulary(self) -> list[str]:
        """Different words of 3 to 12 small letters in the first million tokens, in their order of the alphabet."""
        text = self._tokenizer.decode(self._tokens[: 1 << 20])
        return sorted({word for word in text.split() if _WORD.fullmatch(word)})
