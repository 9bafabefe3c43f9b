"""Bytes and words of text, so that perplexities of different tokenizers compare."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from landmark.data.tokenizers import Tokenizer

_SPACES = (chr(code).encode() for code in range(0x3001) if chr(code).isspace())  # what str.split() parts words by
_BETWEEN = re.compile(b"(?:%s)+" % b"|".join(map(re.escape, _SPACES)))
_REACH = 3  # bytes of the longest whitespace character: how far a byte's class can depend on its neighbours


@dataclass(frozen=True)
class TextSize:
    """Size of a text: UTF-8 bytes, and words, which are parted by whitespace."""

    num_bytes: int
    words: int


def word_starts(text: bytes) -> list[int]:
    """The bytes of UTF-8 text at which words begin, as many as len(text.decode().split())."""
    starts = [*([] if _BETWEEN.match(text) else [0]), *(space.end() for space in _BETWEEN.finditer(text))]
    return [start for start in starts if start < len(text)]


def text_size(tokens: np.ndarray, ranges: Iterable[tuple[int, int]], tokenizer: Tokenizer) -> TextSize:
    """Bytes and words of the text of token ranges [start, stop) of a stream.

    A word belongs to the range of its first byte, so the sizes of adjacent ranges add up. End of text has no bytes and
    parts words. tokens: (N,) ids of the stream.
    """
    total_bytes = total_words = 0
    for start, stop in ranges:
        if not 0 <= start <= stop <= len(tokens):
            raise ValueError(f"token range {start}..{stop} is not inside a stream of {len(tokens)} tokens")
        body_ids = np.asarray(tokens[start:stop])
        total_bytes += int(tokenizer.byte_lengths[body_ids].sum())
        body = tokenizer.decode_bytes(body_ids, special=b" ")
        before = tokenizer.decode_bytes(tokens[max(0, start - _REACH) : start], special=b" ")
        after = tokenizer.decode_bytes(tokens[stop : stop + _REACH], special=b" ")
        total_words += sum(0 <= at - len(before) < len(body) for at in word_starts(before + body + after))
    return TextSize(total_bytes, total_words)
