"""EPUB and DOCX: zip files of markup. The standard library unpacks them; a library for EPUB would add little, as
chapters are XHTML, in an order that one XML file gives.
"""

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from landmark.documents.encoding import decode
from landmark.documents.markup import MOST_MARKUP, SKIPPED, Places, Text, html, quoted
from landmark.documents.raised import lowered, raised, sign

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_DAMAGED = zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError, KeyError, ValueError


class Unpacked:
    """The files of a zip file, of at most MOST_MARKUP bytes together."""

    def __init__(self, content: bytes):
        """Raises ValueError, which says what is wrong."""
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
            self.names = set(self._zip.namelist())
        except _DAMAGED as error:
            raise ValueError("is damaged, it cannot be unpacked") from error
        self._left = MOST_MARKUP

    def read(self, name: str) -> bytes:
        """One file. Raises ValueError, which says what is wrong."""
        try:
            info = self._zip.getinfo(name)
            is_locked = bool(info.flag_bits & 1)
            content = b"" if is_locked else self._zip.open(info).read(self._left + 1)
        except _DAMAGED as error:
            raise ValueError(f"is damaged, {name} cannot be unpacked") from error
        if is_locked:
            raise ValueError("is encrypted: save a copy that needs no password")
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"unpacks to more than {MOST_MARKUP >> 20} MiB of text")
        return content

    def xml(self, name: str, target: Any = None) -> Any:
        """The root of an XML file, or what `target` makes of it. Raises ValueError, which says what is wrong."""
        from lxml import etree  # pyright: ignore[reportAttributeAccessIssue] - it is compiled

        text = decode(self.read(name))
        if "<!ENTITY" in text:
            raise ValueError(f"declares entities in {name}: these are not read, they can grow without end")
        options = {"resolve_entities": False, "no_network": True, "load_dtd": False, "recover": True}
        parser = etree.XMLParser(target=target, encoding="utf-8", **options)
        try:
            root = etree.fromstring(text.encode("utf-8", "replace"), parser)
        except etree.XMLSyntaxError as error:
            raise ValueError(f"is damaged, {name} is no XML") from error
        if root is None:
            raise ValueError(f"is damaged, {name} is no XML")
        return root


def kind(content: bytes) -> str:
    """The kind of a zip file: epub, docx, or what a message says of others."""
    names = (files := Unpacked(content)).names
    if "META-INF/container.xml" in names:
        return "epub"
    if "word/document.xml" in names:
        return "docx"
    kinds = {"xl/workbook.xml": "an Excel table (.xlsx)", "ppt/presentation.xml": "a PowerPoint file (.pptx)"}
    for name, said in kinds.items():
        if name in names:
            return f"{said}: save it as a PDF"
    if "mimetype" in names and files.read("mimetype").startswith(b"application/vnd.oasis"):
        return "an OpenDocument file (.odt, .ods, …): save it as DOCX or PDF"
    return "an archive (zip): unpack it first"


def docx(content: bytes) -> tuple[str, Places]:
    """The text of a DOCX file, its notes at the end; its headings are its places. Raises ValueError, as `html`."""
    files, headings, hidden = Unpacked(content), set[str](), set[str]()
    if "word/styles.xml" in files.names:
        for style in files.xml("word/styles.xml").iter(f"{_W}style"):
            name, id = style.find(f"{_W}name"), style.get(f"{_W}styleId", "")
            if name is not None and name.get(f"{_W}val", "").lower() in (
                "title",
                "heading 1",
                "heading 2",
                "heading 3",
            ):
                headings.add(id)
            vanish = style.find(f"{_W}rPr/{_W}vanish")
            if vanish is not None and _is_on(vanish):
                hidden.add(id)
    text = _Word(headings, hidden)
    for name in ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml"):
        if name in files.names:
            files.xml(name, text)
    return text.close(), tuple(text.headings) or ((0, "line"),)


def _is_on(attributes: Any) -> bool:
    """Whether a property that is there is on."""
    return attributes.get(f"{_W}val", "true") not in ("0", "false", "off")


_FRACTION = {f"{_M}num": ")/(", f"{_M}den": ")"}  # what stands behind the parts of a fraction


class _Word(Text):
    """Of WordprocessingML: only `t` has text, white space and all, and marks that stand for a letter. A row of a table
    is a line. Runs that are raised or lowered one after the other are one superscript or subscript.
    """

    # A text box once more; stops of tabs; what was deleted, or moved elsewhere.
    skipped = SKIPPED | {"Fallback", "tabs", "del", "moveFrom"}
    _is_text = _is_math = _is_labelled = _paragraph_hides = _is_hidden_run = False
    _cells, _label = 0, ""

    def __init__(self, headings: set[str], hidden: set[str]):
        """headings, hidden: styles of paragraphs; hidden also of runs."""
        super().__init__(headings)
        self._hides, self._notes, self._runs = hidden, dict[tuple[str, str], str](), list[str]()
        self._align = self._open_align = self._font = self._properties = ""  # of the run; of `_runs`; pPr, or nothing

    def start(self, tag: str, attributes: Any) -> None:
        name, value = tag.removeprefix(_W), attributes.get(f"{_W}val", "")
        if not self._skipped:
            self._property(name, value, attributes)
        self._is_text, self._is_math = name in ("t", f"{_M}t"), tag.startswith(_M)
        self._cells += name == "tc"
        super().start(tag, attributes)
        if not self._skipped:
            self._mark(name, attributes)

    def _property(self, name: str, value: str, attributes: Any) -> None:
        """What a paragraph and a run say of their letters."""
        if name == "p":
            self._paragraph_hides = False
        elif name == "r":
            self._align, self._font, self._is_hidden_run = "", "", self._paragraph_hides
        elif name == "pPr":
            self._properties = name
        elif name == "pStyle":
            self._paragraph_hides = value in self._hides
        elif self._properties:  # of the mark of a paragraph's end
            return
        elif name == "rStyle":
            self._is_hidden_run |= value in self._hides
        elif name == "vanish":
            self._is_hidden_run = _is_on(attributes)
        elif name == "vertAlign":
            self._align = value if value in ("superscript", "subscript") else ""
        elif name == "rFonts":
            self._font = attributes.get(f"{_W}ascii", "")

    def _mark(self, name: str, attributes: Any) -> None:
        """A letter that is no text in the file."""
        id = attributes.get(f"{_W}id", "")
        if name == f"{_M}num":
            self._add("(")
        elif name in ("footnote", "endnote"):
            self._label = self._notes.get((name, id), "")
        elif name in ("footnoteReference", "endnoteReference") and f"{_W}customMarkFollows" not in attributes:
            kind = name.removesuffix("Reference")
            count = sum(1 for each, _ in self._notes if each == kind) + 1
            self._notes.setdefault((kind, id), f"[{count if kind == 'footnote' else _roman(count)}]")
            self._letters(self._notes[kind, id], "")
        elif name in ("footnoteRef", "endnoteRef"):
            self._letters(f"{self._label} " if self._label else "", "")
            self._is_labelled = True
        elif name == "noBreakHyphen":
            self._letters("-", self._align)
        elif name == "sym":
            code = attributes.get(f"{_W}char", "")
            font = attributes.get(f"{_W}font", "")
            self._letters(sign(font, int(code, 16)) if re.fullmatch("[0-9A-Fa-f]{1,4}", code) else "", self._align)

    def end(self, tag: str) -> None:
        name = tag.removeprefix(_W)
        if name in _FRACTION and not self._skipped:
            self._add(_FRACTION[name])
        super().end(tag)
        self._cells -= name == "tc"
        self._is_text = False
        self._properties = "" if name == "pPr" else self._properties

    def data(self, text: str) -> None:
        if self._is_text and not self._skipped:
            text = text.lstrip() if self._is_labelled else text
            known = (sign(self._font, ord(each)) if "\uf020" <= each <= "\uf0ff" else each for each in text)
            self._letters("".join(known), "" if self._is_math else self._align)
            self._is_labelled = False

    def close(self) -> str:
        self._end_runs()
        return super().close()

    def _letters(self, text: str, align: str) -> None:
        """Text of a run. align: as of vertAlign."""
        if not text or self._is_hidden_run:
            return
        if align != self._open_align:
            self._end_runs()
        if align:
            self._open_align = align
            self._runs.append(text)
        else:
            self._add(text)

    def _end_runs(self) -> None:
        """Write the raised or lowered runs before this place."""
        text, self._open_align = "".join(self._runs), (align := self._open_align) and ""
        self._runs.clear()
        if text:
            before = "\n" if self._breaks else "".join(self._pieces[-3:])[-40:]
            self._add(raised(text, before) if align == "superscript" else lowered(text))

    def _break(self, name: str) -> None:
        if name in ("p", "tab", "br", "cr", "tr", "tc", "ruby", "rt"):
            self._end_runs()
        if not self._cells:
            super()._break(name)
        elif name == "p" and self._pieces and not self._breaks and not self._pieces[-1][-1].isspace():
            self._add(" ")

    def _is_hidden(self, name: str, attributes: Any) -> bool:
        return False


def _roman(number: int) -> str:
    """i, ii, iii, as Word numbers endnotes."""
    values = ("m", 1000), ("cm", 900), ("d", 500), ("cd", 400), ("c", 100), ("xc", 90), ("l", 50), ("xl", 40)
    found = ""
    for letters, value in (*values, ("x", 10), ("ix", 9), ("v", 5), ("iv", 4), ("i", 1)):
        found, number = found + letters * (number // value), number % value
    return found


def epub(content: bytes) -> tuple[str, Places]:
    """The text of an EPUB in its reading order. Its places are the entries of its table of contents, or its headings,
    if these are more. Raises ValueError, as `html`.
    """
    files = Unpacked(content)
    roots = files.xml("META-INF/container.xml").iter("{*}rootfile")
    package = next((root.get("full-path", "") for root in roots), "")
    book = files.xml(package)
    items = {item.get("id"): item for item in book.iter("{*}item") if item.get("href")}
    path = {name: _joined(package, item.get("href")) for name, item in items.items()}
    spine = [path[each.get("idref")] for each in book.iter("{*}itemref") if each.get("idref") in path]
    if "META-INF/encryption.xml" in files.names:
        references = files.xml("META-INF/encryption.xml").iter("{*}CipherReference")
        if {unquote(each.get("URI", "")) for each in references} & set(spine):  # fonts may be
            raise ValueError("is encrypted (DRM): it can be read only in its shop's own program")
    parts, places, length, marks = [], [], 0, dict[str, int]()
    for name in dict.fromkeys(spine):
        if name not in files.names:
            raise ValueError(f"is damaged, {name} is missing")
        part, headings = html(files.read(name), gathered := Text())
        marks[name] = length
        marks |= {f"{name}#{each}": length + start for each, start in gathered.ids.items()}
        places += ((length + start, label) for start, label in headings if label != "line")
        parts.append(f"{part}\n\n" if part else "")
        length += len(parts[-1])
    titles = [(marks[to], quoted(label)) for label, to in _contents(files, items, path) if to in marks and label]
    return "".join(parts), tuple(sorted(dict(max(titles, places, key=len) or [(0, "line")]).items()))


def _contents(files: Unpacked, items: dict[str, Any], path: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The entries of the table of contents: title, and path, perhaps with #id."""
    for id, item in items.items():
        if path[id] not in files.names:
            continue
        if "nav" in item.get("properties", "").split():
            tables = list(files.xml(path[id]).iter("{*}nav"))
            of = next((each for each in tables if "toc" in each.values()), None)
            found = [("".join(a.itertext()), a.get("href", "")) for a in (of.iter("{*}a") if of is not None else ())]
        elif item.get("media-type") == "application/x-dtbncx+xml":
            points = list(files.xml(path[id]).iter("{*}navPoint"))
            found = [(point.findtext("{*}navLabel/{*}text", ""), _source(point)) for point in points]
        else:
            continue
        if found:
            yield from ((" ".join(label.split()), _joined(path[id], to)) for label, to in found)
            return


def _source(point: Any) -> str:
    content = point.find("{*}content")
    return "" if content is None else content.get("src", "")


def _joined(base: str, reference: str) -> str:
    """The path in the zip file to which a file there refers."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(reference)))
