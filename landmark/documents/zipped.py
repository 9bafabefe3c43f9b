"""EPUB and DOCX: zip files of markup. The standard library unpacks them; a library for EPUB would add little, as
chapters are XHTML, in an order that one XML file gives.
"""

import io
import posixpath
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from landmark.documents.encoding import decode
from landmark.documents.markup import MOST_MARKUP, Places, Text, html, quoted

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
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
    files, headings = Unpacked(content), set[str]()
    if "word/styles.xml" in files.names:
        for style in files.xml("word/styles.xml").iter(f"{_W}style"):
            name = style.find(f"{_W}name")
            if name is not None and name.get(f"{_W}val", "").lower() in (
                "title",
                "heading 1",
                "heading 2",
                "heading 3",
            ):
                headings.add(style.get(f"{_W}styleId", ""))
    text = _Word(headings)
    for name in ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml"):
        if name in files.names:
            files.xml(name, text)
    return text.close(), tuple(text.headings) or ((0, "line"),)


class _Word(Text):
    """Of WordprocessingML: only `t` has text, white space and all. A row of a table is a line."""

    _is_text, _cells = False, 0

    def start(self, tag: str, attributes: Any) -> None:
        self._is_text = tag == f"{_W}t"
        self._cells += tag == f"{_W}tc"
        super().start(tag, attributes)

    def end(self, tag: str) -> None:
        super().end(tag)
        self._cells -= tag == f"{_W}tc"
        self._is_text = False

    def data(self, text: str) -> None:
        if self._is_text and not self._skipped:
            self._add(text)

    def _break(self, name: str) -> None:
        if not self._cells:
            super()._break(name)
        elif name == "p" and self._pieces and not self._breaks and not self._pieces[-1][-1].isspace():
            self._add(" ")


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
