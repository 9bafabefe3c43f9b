"""Bytes as text, where it is sure which."""

import codecs
import re
import unicodedata
from typing import NamedTuple

MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"))
MARKS += ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
SURE = 0.003  # by which the best encoding must be ahead of the next that gives another text
SHORT, FEW = 20, 8  # fewer bytes say nothing; with fewer beyond ASCII no other encoding may be plausible
# Those that people have: the detector knows more, and takes curly quotes in English for Czech of an old Macintosh.
PLAUSIBLE = {f"Windows-{number}" for number in range(1250, 1259)} | {f"ISO-8859-{n}" for n in (1, 2, 5, 6, 7, 8, 9)}
PLAUSIBLE |= {
    "iso8859-15",
    "KOI8-R",
    "koi8-u",
    "MacRoman",
    "MacCyrillic",
    "cp437",
    "cp850",
    "cp852",
    "IBM866",
    "TIS-620",
}
PLAUSIBLE |= {
    "CP932",
    "SHIFT_JIS",
    "EUC-JP",
    "ISO-2022-JP",
    "GB18030",
    "Big5",
    "CP949",
    "EUC-KR",
    "utf-16-le",
    "utf-16-be",
}
PLAUSIBLE |= {"UTF-16", "UTF-32", "utf-32-le", "utf-32-be"}
SAMPLE, ODD = 1 << 18, 1 << 14  # bytes that the detector sees, and characters that are looked at in each encoding
GUESSES, BEFORE, SHOWN = 6, 30, 70  # encodings that are offered; characters of a sample, and those before a difference
_FOREIGN = re.compile(r"(?=(.|^)([^\x00-\x7f])(.|$))", re.MULTILINE)
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffe\uffff]")


class Guess(NamedTuple):
    """An encoding in which a text may be, and a part of it that other encodings read otherwise."""

    name: str
    sample: str


class UnsureError(ValueError):
    """It is not sure in which encoding a text is. guesses: the likeliest first."""

    def __init__(self, said: str, guesses: tuple[Guess, ...]):
        super().__init__(said)
        self.guesses = guesses


def decode_as(content: bytes, encoding: str) -> str:
    """The text in an encoding that somebody has named. Raises ValueError, which says what is wrong."""
    try:
        known = codecs.lookup(encoding).name
    except LookupError as error:
        raise ValueError(f"encoding={encoding}: there is none of this name") from error
    if (text := _as(content, known)) is None:
        raise ValueError(f"is not text in {encoding}")
    return text


def decode(content: bytes, declared: str | None = None) -> str:
    """The text, without a mark of the order of bytes. It is read as that mark says, as UTF-8, as `declared`, or as a
    detector is sure. Raises UnsureError where it is not, and another ValueError, which says what is wrong, for bytes
    that are no text.
    """
    for mark, encoding in MARKS:
        if content.startswith(mark):
            try:
                return content[len(mark) :].decode(encoding)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"is not text in {encoding.upper()}, as its first bytes say ({error.reason})"
                ) from error
    try:
        if "\0" not in (text := content.decode()):  # else it is UTF-16 without a mark
            return text
        fault = "is not text in UTF-8 (it has zeros)"
    except UnicodeDecodeError as error:
        fault = f"is not text in UTF-8 (byte {error.start})"
    if declared is not None and (text := _as(content, declared)) is not None:
        return text
    return _detected(content, fault)


def _as(content: bytes, encoding: str) -> str | None:
    """None: it is not that."""
    if encoding.lower() in ("iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii"):
        encoding = "cp1252"  # as browsers read these names
    try:
        text = content.decode(encoding)
        return text if isinstance(text, str) else None  # pyright: ignore[reportUnnecessaryIsInstance] - rot13, hex
    except (LookupError, ValueError):
        return None


def _detected(content: bytes, fault: str) -> str:
    try:
        import chardet
    except ModuleNotFoundError as error:
        raise ValueError(f"{fault}; for other encodings: pip install 'landmark[documents]'") from error
    sample, margin = content, SURE
    if b"\0" not in content:  # else it is UTF-16 or UTF-32
        sample = b"\n".join(line for line in re.split(rb"[\r\n]+", content) if not line.isascii())  # others say nothing
        margin = 1 if sum(byte > 127 for byte in sample[:SAMPLE]) < FEW else SURE
    found = list[tuple[float, str, str]]()
    for each in chardet.detect_all(sample[:SAMPLE]):
        if each["encoding"] in PLAUSIBLE and (text := _as(content, each["encoding"])) and not _NO_TEXT.search(text):
            found.append((each["confidence"], each["encoding"], text))
    known = sorted(found, key=lambda each: -each[0])
    odd = {name: _odd(sample[:SAMPLE].decode(name, "ignore")[:ODD]) for _, name, _ in found}
    found = [each for each in found if odd[each[1]] <= 2 * min(odd.values()) + 0.02]
    if not found or len(content) < SHORT:
        raise ValueError(f"{fault}, nor in another encoding that is known: it is no text, or damaged")
    best, name, text = max(found)
    for confidence, other, differs in found:
        if differs != text and confidence > (1 - margin) * best:
            said = f"{fault}, perhaps in {name} or {other}: convert it, as with iconv -f {name} -t UTF-8"
            raise UnsureError(said, _guesses([(each, own) for _, each, own in known]))
    return text


def _guesses(found: list[tuple[str, str]]) -> tuple[Guess, ...]:
    """A guess for each of the first texts, by encoding, that differ."""
    texts = dict[str, str]()  # the encoding of each
    for name, text in found:
        texts.setdefault(text, name)
    differ = (at for at, letters in enumerate(zip(*texts, strict=False)) if len({*letters}) > 1)
    begin = max(0, next(differ, 0) - BEFORE)
    samples = [(name, " ".join(text[begin : begin + SHOWN].split())) for text, name in texts.items()]
    return tuple(Guess(*each) for each in samples[:GUESSES])


def _odd(text: str) -> float:
    """The share of the characters beyond ASCII that nobody writes there: capitals and signs within a word, as in bržlŽe
    and cr╪me, and letters of two scripts in one word.
    """
    odd = [_is_odd(*match.groups()) for match in _FOREIGN.finditer(text)]
    return sum(odd) / max(1, len(odd))


def _is_odd(before: str, each: str, after: str) -> bool:
    if not each.isalpha():
        within = before.isalpha() and after.isalpha() and each not in "’—–-·"
        return within or unicodedata.category(each) == "So"
    letters = (letter for letter in (before, each, after) if letter.isalpha())
    scripts = {unicodedata.name(letter, "?").partition(" ")[0] for letter in letters}
    return len(scripts) > 1 or (before.islower() and each.isupper())
