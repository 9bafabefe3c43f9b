"""A text that was read from a file, and where its passages stand there."""

import json
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise
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

    def parts(self) -> list[tuple[int, "Document"]]:
        """The documents that were `joined`, each with the character at which its text begins; one alone is itself."""
        names, rest = list[tuple[int, str]](), list(self.places)
        while rest:
            names.append(rest.pop(0))
            while rest and rest[0][1].startswith(f"{names[-1][1]}, "):
                rest.pop(0)
        if len(names) < 2 or ", ".join(name for _, name in names) != self.name:
            return [(0, self)]
        found, ends = list[tuple[int, Document]](), [*(start for start, _ in names[1:]), len(self.text)]
        for (start, name), end in zip(names, ends, strict=True):
            begin, label = start + len(f"{name}\n\n"), f"{name}, "
            own = [(at - begin, each.removeprefix(label)) for at, each in self.places if begin <= at < end]
            found.append((begin, Document(name, self.text[begin:end].rstrip(), tuple(own))))
        return found


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


def placed(decode: Callable[[Sequence[int]], str], ids: Sequence[int], starts: Sequence[int]) -> list[tuple[int, str]]:
    """The texts of ids that begin at `starts`, each with its first character in the text of all."""
    text, at, found = decode(ids), 0, list[tuple[int, str]]()
    for start, end in pairwise([*starts, len(ids)]):
        own = decode(ids[start:end])
        at = max(at, text.find(own, at))  # some tokenizers write a space between two texts
        found.append((at, own))
        at += len(own)
    return found


def documents_read(
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
    given: Document | None,
    loaded: Sequence[str | Path] = (),
    starts: Sequence[int] = (0,),
) -> list[tuple[int, Document]]:
    """What a memory has read, each document with the character at which it begins. ids: all of it, which `decode` makes
    a text. given: what was read last. loaded: the folders of memories that had read what is before. starts: the first
    id of each text that was read alone. Texts of one folder, as of a memory that was joined and saved, are one.
    """
    if not loaded:
        return given.parts() if given is not None else []
    text, found = decode(ids), list[tuple[int, Document]]()
    if len(starts) != len(loaded):
        loaded, starts = [*loaded[:1]], (0,)
    for folder, (at, own) in zip(loaded, placed(decode, ids, starts), strict=True):
        document = saved_document(folder, own) or Document("" if len(loaded) == 1 else Path(folder).name, own)
        found += [(at + begin, part) for begin, part in document.parts()]
    if given is None:
        return found
    begin = len(text) - len(given.text)
    at, last = found.pop()  # its memory may not say where its text has ended
    found.append((at, last._replace(text=last.text[: begin - at])))
    return found + [(begin + start, document) for start, document in given.parts()]
