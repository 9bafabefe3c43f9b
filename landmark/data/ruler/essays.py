"""The text of a split as essays: its words in their order, and its different words."""

import re
from functools import cached_property

import numpy as np

from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError

_WORD = re.compile(r"[a-z]{3,12}")
_AT_FIRST = 1 << 14  # tokens that are decoded first


class Essays:
    """Words of a stream, decoded as far as they are needed; after its end it begins again."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        """
        Args:
            tokens: (N,) ids of the stream.
            tokenizer: of the stream.

        Raises UserError for a stream without words.
        """
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
