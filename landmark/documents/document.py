"""A text that was read from a file, and where its passages stand there."""

import json
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from landmark.utils.files import read_json

FILE = "document.json"  # beside a saved memory: the names and the places of the text that it has read


class Document(NamedTuple):
    """A text. name: of its file, or what tells it from others of a corpus. places: sorted, each the offset of a
    character, and a label that holds until the next: `page 12`, `“A Chapter”`, or one that ends in `line`, to which
    the number of the line since the offset is added.
    """

    name: str
    text: str
    places: tuple[tuple[int, str], ...] = ((0, "line"),)

    def place(self, offset: int) -> str:
        """Where a character stands, as in "page 12", "“A Chapter”" or "line 310"."""
        number = bisect(self.places, offset, key=lambda place: place[0]) - 1
        start, label = self.places[number] if number >= 0 else (0, "line")
        return f"{label} {self.text.count(chr(10), start, offset) + 1}" if label.endswith("line") else label


def joined(documents: Sequence[Document]) -> Document:
    """One after the other, each begun by a line with its name, which its places have too. One alone stays as it is."""
    if len(documents) == 1:
        return documents[0]
    text, places = "", list[tuple[int, str]]()
    for document in documents:
        places.append((len(text), document.name))
        text += f"{document.name}\n\n"
        places += ((len(text) + start, f"{document.name}, {label}") for start, label in document.places)
        text += f"{document.text.rstrip()}\n\n"
    return Document(", ".join(document.name for document in documents), text, tuple(places))


def beside_memory(document: Document | None, loaded: str | Path | None) -> dict[str, bytes]:
    """A file to save beside the memory that has read a document. It holds no text, which the memory's tokens have.
    loaded: the folder of the memory that went on with it; then it is about the text of that one alone.
    """
    if loaded is not None:
        return {FILE: file.read_bytes()} if (file := Path(loaded) / FILE).is_file() else {}
    if document is None:
        return {}
    content = {"name": document.name, "length": len(document.text), "places": document.places}
    return {FILE: json.dumps(content, ensure_ascii=False).encode()}


def saved_document(folder: str | Path, text: str) -> Document | None:
    """The document that a saved memory has read first; None: it began with another text. text: of the memory's tokens.
    Raises UserError for a damaged file.
    """
    if not (file := Path(folder) / FILE).is_file():
        return None
    content = read_json(file, {"name": str, "length": int, "places": list})
    places = tuple((int(start), str(label)) for start, label in content["places"])
    return Document(content["name"], text[: content["length"]], places)
