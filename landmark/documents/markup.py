"""HTML as text with places. lxml calls for each mark as it comes, so no tree of a large file is built; it looks neither
at the network nor at other files. (Python's own html.parser takes quadratic time on files that are made for it.)
"""

import re
from collections.abc import Set
from typing import Any

from landmark.documents.encoding import decode

Places = tuple[tuple[int, str], ...]
MOST_MARKUP = 1 << 26  # bytes of HTML, or of all that is unpacked from a file
DEPTH = 500  # most elements in one another: libxml2 looks through all of them at a mark that closes none
PIECE = 1 << 14  # bytes after which it is seen how deep they are
PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "table", "ul", "ol", "dl", "figure"}
LINES = {"div", "br", "cr", "li", "tr", "dt", "dd", "hr", "section", "article", "header", "footer", "main", "aside"}
SKIPPED = {"head", "script", "style", "template", "noscript", "nav", "svg", "iframe", "object", "select"}
SKIPPED |= {"Fallback", "tabs"}  # of WordprocessingML: a text box once more, and stops of tabs
HEADINGS = {"h1", "h2", "h3"}


class Text:
    """What lxml calls with each mark of HTML or of WordprocessingML; gathers text, headings and the places of ids."""

    def __init__(self, headings: Set[str] = HEADINGS):
        """headings: tags, or, of WordprocessingML, styles of paragraphs."""
        self.headings: list[tuple[int, str]] = []
        self.ids: dict[str, int] = {}
        self.length = self.deepest = 0
        self._pieces, self._styles = list[str](), headings
        self._breaks = self._depth = self._skipped = self._pre = 0
        self._waiting = list[str]()  # ids whose text has not begun
        self._heading: int | None = None  # the piece with which the heading begins that is being read

    def start(self, tag: str, attributes: Any) -> None:
        name = tag.rpartition("}")[2]
        self._depth += 1
        self.deepest = max(self.deepest, self._depth)
        if self._skipped or name in SKIPPED:
            self._skipped += 1
            return
        self._break(name)
        self._waiting += (each for each in (attributes.get("id"), attributes.get("name")) if each)
        self._pre += name == "pre"
        value = attributes.get(f"{tag[: -len(name)]}val") if name == "pStyle" else name
        if value in self._styles:
            self._heading = len(self._pieces)

    def end(self, tag: str) -> None:
        name = tag.rpartition("}")[2]
        self._depth -= 1
        if self._skipped:
            self._skipped -= 1
            return
        if self._heading is not None and name in (*HEADINGS, "p"):
            if label := " ".join("".join(self._pieces[self._heading :]).split()):
                start = self.length - len("".join(self._pieces[self._heading :]).lstrip())
                self.headings.append((start, quoted(label)))
            self._heading = None
        self._pre -= name == "pre"
        self._break(name)
        if name in ("td", "th", "tc", "tab"):
            self._add("\t")

    def data(self, text: str) -> None:
        if self._skipped:
            return
        if not self._pre:
            text = re.sub(r"[ \t\r\n\f]+", " ", text)
            if self._breaks or not self._pieces or self._pieces[-1][-1].isspace():
                text = text.lstrip(" ")
        self._add(text.replace("\xa0", " ").replace("\xad", ""))

    def comment(self, text: str) -> None:
        """No text."""

    def close(self) -> str:
        """The text."""
        return "".join(self._pieces)

    def _break(self, name: str) -> None:
        self._breaks = max(self._breaks, 2 if name in PARAGRAPHS else 1 if name in LINES else 0)

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._breaks:
            self._end_line()
        self.ids |= dict.fromkeys((each for each in self._waiting if each not in self.ids), self.length)
        self._waiting.clear()
        self._pieces.append(text)
        self.length += len(text)

    def _end_line(self) -> None:
        """Breaks in place of the white space at the end."""
        while self._pieces:
            piece = self._pieces.pop()
            self.length -= len(piece)
            if piece := piece.rstrip(" \t"):
                piece += "\n" * self._breaks
                self._pieces.append(piece)
                self.length += len(piece)
                break
        self._breaks = 0
        if self._heading is not None:
            self._heading = min(self._heading, len(self._pieces))


def quoted(label: str) -> str:
    """A heading as a place, of at most 80 characters."""
    return f"“{label if len(label) <= 80 else f'{label[:79]}…'}”"


def html(content: bytes, text: Text | None = None) -> tuple[str, Places]:
    """The text of HTML, with its headings as places. text: gathers it. Raises ValueError, which says what is wrong."""
    from lxml import etree  # pyright: ignore[reportAttributeAccessIssue] - it is compiled

    if len(content) > MOST_MARKUP:
        raise ValueError(f"is larger than {MOST_MARKUP >> 20} MiB")
    named = re.search(
        rb"""<(?:meta|\?xml)[^>]{,200}?(?:charset|encoding)\s*=\s*["']?([\w.:-]+)""", content[:4096], re.I
    )
    decoded = decode(content, named[1].decode() if named else None)
    # In XHTML these may be closed at once, and hide the rest of the text from HTML's rules.
    decoded = re.sub(
        r"<(script|style|title|textarea|iframe|noscript|a|p|div|span)\b([^<>]*)/>", r"<\1\2></\1>", decoded
    )
    text = Text() if text is None else text
    parser, encoded = (
        etree.HTMLParser(target=text, encoding="utf-8", no_network=True),
        decoded.encode("utf-8", "replace"),
    )
    for start in range(0, len(encoded), PIECE):
        parser.feed(encoded[start : start + PIECE])
        if text.deepest > DEPTH:
            raise ValueError(f"has more than {DEPTH} elements in one another")
    if decoded.strip():
        parser.close()
    return text.close(), tuple(text.headings) or ((0, "line"),)
