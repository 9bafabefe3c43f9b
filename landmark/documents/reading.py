"""Files become documents. Their first bytes say what they are, not their names alone; each kind that is not read is
refused by its name.
"""

import importlib.util
import logging
import re
import unicodedata
from pathlib import Path

from landmark.documents import markup, pdf, zipped
from landmark.documents.document import Document
from landmark.documents.encoding import Guess, UnsureError, decode, decode_as
from landmark.utils.errors import UserError, counted

_log = logging.getLogger(__name__)
MOST = 1 << 30  # bytes of a file
MOST_TEXT = 1 << 26  # characters of a PDF
RANGES = 8  # of pages, that a line names
READ = "PDF, EPUB, DOCX, HTML, Markdown and plain text are read"
PACKAGES = {"pdf": "pypdfium2", "epub": "lxml", "docx": "lxml", "html": "lxml"}  # of the extra `documents`
# What a file begins with, and what it is then.
_BEGINNINGS = tuple(
    (re.compile(beginning, re.DOTALL), said)
    for beginning, said in (
        (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|RIFF.{4}WEBP|\0\0\0.ftyp(he|mif1|avif)", f"a picture; {READ}"),
        (rb"ID3[\2-\4]|OggS\0|fLaC\0|\xff[\xfb\xf3\xf2]|\x1aE\xdf\xa3|RIFF.{4}(WAVE|AVI )", f"sound or a film; {READ}"),
        (rb"\0\0\0.ftyp", f"sound or a film; {READ}"),
        (
            rb"\x1f\x8b|BZh\d1AY&SY|\xfd7zXZ|7z\xbc\xaf|Rar!\x1a|\x28\xb5\x2f\xfd|.{257}ustar",
            "an archive: unpack it first",
        ),
        (rb"\xd0\xcf\x11\xe0", "an old Office file (.doc, .xls, …), or an encrypted one: save it as DOCX or PDF"),
        (rb"\{\\rtf", "RTF: save it as DOCX or PDF"),
        (rb"%!PS", "PostScript: convert it with ps2pdf"),
        (rb"AT&TFORM", "DjVu: convert it with ddjvu -format=pdf"),
        (rb".{60}BOOKMOBI", "a Kindle book (MOBI): convert it to EPUB"),
        (rb"GGUF[\1-\3]\0", "a model, not a text"),
        (rb"\x7fELF", "a program"),
        (rb"SQLite format 3\0", "a database"),
    )
)
# Files with these suffixes are never text, whatever they begin with.
_BINARY = (
    r"\.(pdf|epub|docx?|xlsx?|pptx?|od[tsp]|zip|gz|bz2|xz|7z|rar|tar|zst|png|jpe?g|gif|tiff?|webp|bmp|mp[34]|wav|ogg)"
)


class TextlessError(UserError):
    """A file that has no text: it is empty, or scanned."""


class EncodingError(UserError):
    """A text of which it is not sure in which encoding it is. guesses: the likeliest first."""

    guesses: tuple[Guess, ...] = ()


class _Textless(ValueError):
    """What a `TextlessError` says of the file."""


def read_document(path: str | Path) -> Document:
    """The text of a file, and where its passages stand in it.

    PDF, EPUB, DOCX and HTML, and text that is not in UTF-8, need the packages of the extra `documents`. Nothing is
    written, and nothing is fetched. Raises UserError, which begins with the path, for a file that cannot be read.
    """
    if (file := Path(path)).is_char_device() or file.is_block_device():  # which may have no end
        raise UserError(f"{path}: is a device, name a file (- for standard input)")
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return document_of(content, str(path))._replace(name=file.name)


def document_of(content: bytes, name: str, encoding: str | None = None) -> Document:
    """The document that the bytes of a file are. name: its suffix is a hint at what they are. encoding: of a text or
    HTML (None: it is found). Raises UserError as `read_document`, which begins with the name.
    """
    try:
        content = content if encoding is None else decode_as(content, encoding).encode()
        text, places, lacks = _read(content, name)
        if not text.strip():
            raise _Textless("has no text")
    except UnsureError as error:
        raised = EncodingError(f"{name}: {error}")
        raised.guesses = error.guesses
        raise raised from error
    except (ValueError, RecursionError, MemoryError) as error:
        kind = TextlessError if isinstance(error, _Textless) else UserError
        raise kind(f"{name}: {error}") from error
    lacks = tuple(f"{Path(name).name}: {each}" for each in lacks)
    for each in lacks:
        _log.warning(each)
    return Document(name, text, places, lacks=lacks)


def kind_of(content: bytes, name: str) -> str:
    """pdf, epub, docx, html or text. Raises ValueError, which says what it is, for what is not read."""
    suffix = Path(name).suffix.lower()
    if not content:
        raise _Textless("is empty")
    if len(content) > MOST:
        raise ValueError(f"is larger than {MOST >> 30} GiB")
    if content.lstrip()[:5] == b"%PDF-" or (suffix == ".pdf" and b"%PDF-" in content[:1024]):
        return "pdf"
    if content.startswith((b"PK\3\4", b"PK\5\6")):
        kind = zipped.kind(content)
        if kind not in ("epub", "docx"):
            raise ValueError(f"is {kind}")
        return kind
    for beginning, said in _BEGINNINGS:
        if beginning.match(content):
            raise ValueError(f"is {said}")
    if re.fullmatch(_BINARY, suffix):
        raise ValueError(f"is no {suffix[1:].upper()} inside: damaged, or under a wrong name; {READ}")
    beginning = content[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_html = beginning.startswith((b"<!doctype html", b"<html")) or (
        beginning.startswith(b"<?xml") and b"<html" in beginning
    )
    return "html" if is_html or suffix in (".html", ".htm", ".xhtml") else "text"


def _read(content: bytes, name: str) -> tuple[str, markup.Places, tuple[str, ...]]:
    """The text, its places, and what the file did not give."""
    kind = kind_of(content, name)
    if kind in PACKAGES and importlib.util.find_spec(PACKAGES[kind]) is None:
        raise ValueError(f"{kind.upper()} needs the package {PACKAGES[kind]}: pip install 'landmark[documents]'")
    if kind == "pdf":
        return _pdf(content)
    if kind != "text":
        return *{"html": markup.html, "epub": zipped.epub, "docx": zipped.docx}[kind](content), ()
    return decode(content).replace("\r\n", "\n").replace("\r", "\n"), ((0, "line"),), ()


def _pdf(content: bytes) -> tuple[str, markup.Places, tuple[str, ...]]:
    """The pages, of which those without text have no place."""
    text, places, pages = "", list[tuple[int, str]](), pdf.pages(content, MOST_TEXT)
    words = {word for page in pages for word in re.findall(r"\w+", page.text.lower())}
    unread = [number for number, page in enumerate(pages, 1) if _is_unread(page.text)]

    def hyphen(match: re.Match[str]) -> str:  # PDFium has joined two lines here
        return match[1] if f"{match[1]}{match[2]}".lower() in words else f"{match[1]}-"

    for number, (page, _, _) in enumerate(pages, 1):
        page = re.sub("(\\w{,40})[\ufffe\x02](?=(\\w{,40}))", hyphen, page).replace("\0", "")
        page = re.sub("\xad(?:[ \t]*\n[ \t]*)?", "", page.replace("\r\n", "\n"))  # soft: it shows at a line's end alone
        if page := page.strip():
            places.append((len(text), f"page {number}"))
            text += f"{page}\n\n"
    pictures = [number for number, page in enumerate(pages, 1) if page.is_picture]
    blank = [number for number, page in enumerate(pages, 1) if page.is_blank]
    if not places or len(pictures) + len(blank) == len(pages):
        said = f"has {'hardly any' if places else 'no'} text on its {counted(len(pages), 'page')}"
        raise _Textless(f"{said}, it is scanned: run ocrmypdf on it first" if pictures else said)
    without = [number for number in pictures if not pages[number - 1].text.strip()]
    hardly = [number for number in pictures if number not in without]
    found = (
        (without, "no text, but pictures: ocrmypdf adds the text of scans"),
        (hardly, "hardly any text, but pictures: ocrmypdf adds the text of scans"),
        (unread, "letters that cannot be read: the file does not say which they are"),
    )
    return text, tuple(places), tuple(f"{_numbered(numbers)} {what}" for numbers, what in found if numbers)


def _is_unread(text: str) -> bool:
    """Whether most letters of a page are in no alphabet: their font has no table of them."""
    letters = "".join(text.split())
    odd = [each == "\ufffd" or unicodedata.category(each) in ("Co", "Cn", "Cc") for each in letters]
    return 2 * sum(odd) > len(odd)


def _numbered(numbers: list[int]) -> str:
    """As in "pages 2, 5–7 and 9 have", at most RANGES of them."""
    ranges = list[list[int]]()
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [f"{first}" if first == last else f"{first}–{last}" for first, last in ranges[:RANGES]]
    if more := sum(last - first + 1 for first, last in ranges[RANGES:]):
        shown.append(f"{more} more")
    listed = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    return f"page {listed} has" if len(numbers) == 1 else f"pages {listed} have"
