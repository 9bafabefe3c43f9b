"""HTML as text with places. lxml calls for each mark as it comes, so no tree of a large file is built; it looks neither
at the network nor at other files. (Python's own html.parser takes quadratic time on files that are made for it.)
"""

import re
from collections.abc import Set
from typing import Any

from landmark.documents.encoding import decode
from landmark.documents.raised import lowered, raised

Places = tuple[tuple[int, str], ...]
MOST_MARKUP = 1 << 26  # bytes of HTML, or of all that is unpacked from a file
DEPTH = 500  # most elements in one another: libxml2 looks through all of them at a mark that closes none
PIECE = 1 << 14  # bytes after which it is seen how deep they are
PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "table", "ul", "ol", "dl", "figure"}
LINES = {"div", "br", "cr", "li", "tr", "dt", "dd", "hr", "section", "article", "header", "footer", "main", "aside"}
SKIPPED = {"head", "script", "style", "template", "noscript", "nav", "svg", "iframe", "object"}
SKIPPED |= {"select", "button", "textarea", "datalist"}  # fields of forms
SKIPPED |= {"rp", "rtc", "annotation", "annotation-xml"}  # what another element says too
HEADINGS = {"h1", "h2", "h3"}
TAKEN = {"sup", "sub", "rt", "ruby"}  # elements whose text is taken back when they end, and written in another way
HIDDEN = re.compile(r"(?:^|[;{\s])(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.I)
NOTES = re.compile(
    r"noteref|(?<!\S)(?:(?:foot|end)note-?(?:ref|anchor|link)|reference|fn)(?!\S)", re.I
)  # marks of notes
BACK = re.compile(r"doc-backlink|(?<!\S)(?:foot|end)note-?back", re.I)  # ways from a note to its mark
BEFORE = 40  # characters before a superscript that say what it is


class Text:
    """What lxml calls with each mark of HTML or of WordprocessingML; gathers text, headings and the places of ids."""

    skipped = SKIPPED

    def __init__(self, headings: Set[str] = HEADINGS):
        """headings: tags, or, of WordprocessingML, styles of paragraphs."""
        self.hidden = set[str]()  # as of `hidden_by_sheets`
        self.headings: list[tuple[int, str]] = []
        self.ids: dict[str, int] = {}
        self.length = self.deepest = 0
        self._pieces, self._styles = list[str](), headings
        self._breaks = self._depth = self._skipped = self._pre = 0
        self._waiting = list[str]()  # ids whose text has not begun
        self._heading: int | None = None  # the piece with which the heading begins that is being read
        self._taken = list[
            tuple[str, int, bool]
        ]()  # open elements of TAKEN: name, their first piece, whether it is a note
        self._links, self._readings = list[tuple[bool, bool]](), ""

    def start(self, tag: str, attributes: Any) -> None:
        name = tag.rpartition("}")[2]
        self._depth += 1
        self.deepest = max(self.deepest, self._depth)
        if self._skipped or name in self.skipped or self._is_hidden(name, attributes):
            self._skipped += 1
            return
        self._break(name)
        if name == "a":
            self._links.append((is_note := _is_note(attributes), "#" in attributes.get("href", "")))
            self._taken += [("note", self._begun(), True)] if is_note else []
            if attributes.get("href") and self._taken:
                self._taken[-1] = (*self._taken[-1][:2], True)
        elif name in TAKEN:
            self._taken.append((name, self._begun(), _is_note(attributes) or any(map(any, self._links))))
        elif name == "q":
            self._add("“")
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
        if name == "a" and self._links and self._links.pop()[0]:
            self._take("note")
        elif name in TAKEN:
            self._take(name)
        elif name == "q":
            self._add("”")
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

    def _is_hidden(self, name: str, attributes: Any) -> bool:
        """Whether browsers show nothing of an element of HTML. A search in the page finds hidden="until-found"."""
        if attributes.get("hidden", "until-found").lower() != "until-found" or BACK.search(_kinds(attributes)):
            return True
        if HIDDEN.search(attributes.get("style", "")):
            return True
        names = {f".{each}" for each in attributes.get("class", "").split()} | {f"#{attributes.get('id', '')}"}
        return not self.hidden.isdisjoint(names | {f"{name}{each}" for each in names})

    def _begun(self) -> int:
        """The next piece, on the line where it will stand."""
        if self._breaks:
            self._end_line()
        return len(self._pieces)

    def _take(self, name: str) -> None:
        """Write the text of an element of TAKEN that has ended in another way. Of ruby the readings stand behind."""
        if not self._taken or self._taken[-1][0] != name:  # elements that end across each other
            return
        _, first, is_note = self._taken.pop()
        if name == "ruby":
            readings, self._readings = self._readings, ""
            return self._add(f"({readings})" if readings else "")
        text = "".join(self._pieces[first:])
        del self._pieces[first:]
        self.length -= len(text)
        if name == "rt":
            self._readings += text.strip()
        elif name == "sub":
            self._add(lowered(text))
        elif name == "note" and any(each[0] == "sup" for each in self._taken):
            self._add(text)
        else:
            self._add(raised(text, "".join(self._pieces[-3:])[-BEFORE:], is_note))

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
            if piece := piece.rstrip(" \t\n"):
                piece += "\n" * self._breaks
                self._pieces.append(piece)
                self.length += len(piece)
                break
        self._breaks = 0
        if self._heading is not None:
            self._heading = min(self._heading, len(self._pieces))


def _kinds(attributes: Any) -> str:
    """What an element of HTML says that it is."""
    return " ".join(attributes.get(name, "") for name in ("epub:type", "role", "class"))


def _is_note(attributes: Any) -> bool:
    """Whether an element of HTML is the mark of a note."""
    return NOTES.search(_kinds(attributes)) is not None


def hidden_by_sheets(text: str) -> set[str]:
    """The classes, ids and tags with one of these (`.a`, `#a`, `p.a`) that the style sheets in HTML always hide."""
    found = set[str]()
    for sheet in re.findall(r"<style\b[^>]*>(.*?)</style", text, re.I | re.DOTALL):
        rules = re.sub(r"/\*.*?\*/|@[^{};]*(?:;|\{(?:[^{}]*\{[^{}]*\})*[^{}]*\})", "", sheet, flags=re.DOTALL)
        for selectors, rule in re.findall(r"([^{}]+)\{([^{}]*)\}", rules):
            if HIDDEN.search(rule):
                found |= {each for part in selectors.split(",") if re.fullmatch(r"\w*[.#][\w-]+", each := part.strip())}
    return found


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
    text.hidden = hidden_by_sheets(decoded)
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
