"""Bytes and words of text, so that perplexities of different tokenizers compare."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from landmark.data.tokenizers import Tokenizer

# Whitespace of str.split() beyond ASCII, by its length in UTF-8: the bytes read as one number.
_WIDE_CODES = (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
_WIDE_SPACES = {
    length: np.array([int.from_bytes(space) for code in _WIDE_CODES if len(space := chr(code).encode()) == length])
    for length in (2, 3)
}
_REACH = 3  # bytes of the longest whitespace character: how far a byte's class can depend on its neighbours


@dataclass(frozen=True)
class TextSize:
    """Size of a text: UTF-8 bytes, and words, which are parted by whitespace."""

    num_bytes: int
    words: int


def word_starts(text: bytes) -> np.ndarray:
    """Whether a word begins at each byte of UTF-8 text, (len(text),) bool. The sum is len(text.decode().split())."""
    space = _spaces(text)
    starts = ~space
    starts[1:] &= space[:-1]
    return starts


def _spaces(text: bytes) -> np.ndarray:
    """Whether each byte is part of whitespace, (len(text),) bool."""
    values = np.frombuffer(text, dtype=np.uint8)
    space = (values - np.uint8(0x09) < 5) | (values - np.uint8(0x1C) < 5)  # 0x09-0x0D, 0x1C-0x20: lower ones wrap
    if text.isascii():
        return space
    for length, wide in _WIDE_SPACES.items():
        first = np.flatnonzero(values[: 1 - length] >= 0xC2)
        number = np.zeros(len(first), dtype=np.int32)
        for at in range(length):
            number = number << 8 | values[first + at]
        first = first[np.isin(number, wide)]
        for at in range(length):
            space[first + at] = True
    return space


def count_words(text: bytes) -> int:
    """Words of UTF-8 text: len(text.decode().split()), without holding the interpreter lock."""
    return int(np.count_nonzero(word_starts(text)))


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
        inside = slice(len(before), len(before) + len(body))
        total_words += int(np.count_nonzero(word_starts(before + body + after)[inside]))
    return TextSize(total_bytes, total_words)
