"""Where the text of tokens differs from the text of a file: some tokenizers normalise, as Qwen's composes accents."""

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

LONGEST = 48  # characters of a difference that is looked for; a longer one ends at the text's end
SAME = 12  # characters that are alike behind a difference that no normal form explains


class Patch(NamedTuple):
    """Characters start to end of the tokens' text stand for `text` of the file."""

    start: int
    end: int
    text: str


Patches = Sequence[Patch]


def differences(file: str, read: str) -> tuple[Patch, ...]:
    """The patches that make the file's text of the text of its tokens."""
    return tuple(_differences(file, read)) if file != read else ()


def _differences(file: str, read: str) -> Iterator[Patch]:
    at, other = 0, 0
    while at < len(file) or other < len(read):
        same = _alike(file, at, read, other)
        at, other = at + same, other + same
        if at == len(file) and other == len(read):
            return
        more, others = _difference(file, at, read, other)
        yield Patch(other, other + others, file[at : at + more])
        at, other = at + more, other + others


def _alike(file: str, at: int, read: str, other: int) -> int:
    """How many characters are the same from two places on."""
    length, step, is_growing = 0, 16, True
    while step and (part := file[at + length : at + length + step]):
        if part == read[other + length : other + length + step]:
            length += len(part)
            step = 2 * step if is_growing else step // 2
        else:
            step, is_growing = step // 2, False
    return length


def _difference(file: str, at: int, read: str, other: int) -> tuple[int, int]:
    """How many characters of both texts are a difference: the shortest parts that have one normal form, else those
    behind which both go on alike.
    """
    most, others = min(LONGEST, len(file) - at), min(LONGEST, len(read) - other)
    for total in range(1, most + others + 1):
        for more in range(max(0, total - others), min(most, total) + 1):
            a, b = file[at : at + more], read[other : other + total - more]
            behind, too = file[at + more :][:1], read[other + total - more :][:1]
            if any(map(unicodedata.combining, behind + too)):
                continue
            if a and b and unicodedata.normalize("NFKC", a) == unicodedata.normalize("NFKC", b):
                return more, total - more
    for total in range(1, most + others + 1):
        for more in range(max(0, total - others), min(most, total) + 1):
            a, b = file[at + more : at + more + SAME], read[other + total - more : other + total - more + SAME]
            if a == b:
                return more, total - more
    return len(file) - at, len(read) - other


def file_text(read: str, patches: Patches) -> str:
    """The text of a file, from the text of its tokens."""
    parts, at = list[str](), 0
    for start, end, text in patches:
        parts += read[at:start], text
        at = end
    return "".join([*parts, read[at:]])


class Places:
    """Characters of the tokens' text as characters of the file's text, and the other way. Within a patch all are its
    beginning.
    """

    def __init__(self, patches: Patches):
        self._lengths = [(each.end - each.start, len(each.text)) for each in patches]
        self._read = [each.start for each in patches]
        shifts = accumulate((own - read for read, own in self._lengths), initial=0)
        self._shifts = list(shifts)  # before each patch, and behind the last
        self._file = [start + shift for start, shift in zip(self._read, self._shifts, strict=False)]

    def in_file(self, offset: int) -> int:
        """The place in the file of a character of the tokens' text."""
        number = bisect_right(self._read, offset) - 1
        if number < 0:
            return offset
        start, (length, _) = self._read[number], self._lengths[number]
        return self._file[number] if offset < start + length else offset + self._shifts[number + 1]

    def in_read(self, offset: int) -> int:
        """The place in the tokens' text of a character of the file."""
        number = bisect_right(self._file, offset) - 1
        if number < 0:
            return offset
        start, (_, length) = self._file[number], self._lengths[number]
        return self._read[number] if offset < start + length else offset - self._shifts[number + 1]
