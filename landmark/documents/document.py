"""A text that was read from a file, and where its passages stand there."""

import json
from bisect import bisect, bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from landmark.documents.patches import Patch, Places, differences, file_text
from landmark.utils.errors import UserError
from landmark.utils.files import read_json

FILE = "document.json"  # beside a saved memory: the names and the places of the text that it has read


class Document(NamedTuple):
    """A text. name: of its file, or what tells it from others of a corpus. places: sorted, each the offset of a
    character, and a label that holds until the next: `page 12`, `“A Chapter”`, or one that ends in `line`, to which
    the number of the line since the offset is added. patches: where the text of the tokens that were made of it, which
    some tokenizers normalise, differs from it. lacks: what its file did not give, a line each, with
    its name.
    """

    name: str
    text: str
    places: tuple[tuple[int, str], ...] = ((0, "line"),)
    patches: tuple[Patch, ...] = ()
    lacks: tuple[str, ...] = ()

    def as_read(self, read: str) -> "Document":
        """The document whose tokens have this text."""
        return self._replace(patches=differences(self.text, read))

    @property
    def read_length(self) -> int:
        """Characters of the text of its tokens."""
        return len(self.text) - sum(len(each.text) - each.end + each.start for each in self.patches)

    def place(self, offset: int) -> str:
        """Where a character stands, as in "page 12", "“A Chapter”" or "line 310"."""
        number = bisect(self.places, offset, key=lambda place: place[0]) - 1
        start, label = self.places[number] if number >= 0 else (0, "line")
        return f"{label} {self.text.count(chr(10), start, offset) + 1}" if label.endswith("line") else label

    def parts(self) -> list[tuple[int, "Document"]]:
        """The documents that were `concatenated`, each with the character at which its text begins in the text of the
        tokens; one alone is itself.
        """
        names, rest = list[tuple[int, str]](), list(self.places)
        while rest:
            names.append(rest.pop(0))
            while rest and rest[0][1].startswith(f"{names[-1][1]}, "):
                rest.pop(0)
        if len(names) < 2 or ", ".join(name for _, name in names) != self.name:
            return [(0, self)]
        found, ends = list[tuple[int, Document]](), [*(start for start, _ in names[1:]), len(self.text)]
        read = Places(self.patches)
        for (start, name), end in zip(names, ends, strict=True):
            begin, label = start + len(f"{name}\n\n"), f"{name}, "
            own = [(at - begin, each.removeprefix(label)) for at, each in self.places if begin <= at < end]
            text = self.text[begin:end].rstrip()
            first, last = read.in_read(begin), read.in_read(begin + len(text))
            starts = [each.start for each in self.patches]
            inside = self.patches[bisect_left(starts, first) : bisect_left(starts, last)]
            patches = tuple(Patch(each.start - first, each.end - first, each.text) for each in inside)
            found.append((first, Document(name, text, tuple(own), patches)))
        return found


def concatenated(documents: Sequence[Document]) -> Document:
    """One after the other, each begun by a line with its name, which its places have too. One alone stays as it is."""
    if len(documents) == 1:
        return documents[0]
    text, places = "", list[tuple[int, str]]()
    for document in documents:
        places.append((len(text), document.name))
        text += f"{document.name}\n\n"
        places += ((len(text) + start, f"{document.name}, {label}") for start, label in document.places)
        text += f"{document.text.rstrip()}\n\n"
    lacks = tuple(each for document in documents for each in document.lacks)
    return Document(", ".join(document.name for document in documents), text, tuple(places), lacks=lacks)


def beside_memory(document: Document | None, loaded: str | Path | None) -> dict[str, bytes]:
    """A file to save beside the memory that has read a document. It holds no text but what the memory's tokens lack.
    loaded: the folder of the memory that went on with it; then it is about the text of that one alone.
    """
    if loaded is not None:
        return {FILE: file.read_bytes()} if (file := Path(loaded) / FILE).is_file() else {}
    if document is None:
        return {}
    content = {"name": document.name, "length": document.read_length, "places": document.places}
    content |= {name: each for name in ("patches", "lacks") if (each := getattr(document, name))}
    return {FILE: json.dumps(content, ensure_ascii=False).encode()}


def saved_document(folder: str | Path, text: str) -> Document | None:
    """The document that a saved memory has read first; None: it began with another text. text: of the memory's tokens.
    Raises UserError for a damaged file.
    """
    if not (file := Path(folder) / FILE).is_file():
        return None
    content = read_json(file, {"name": str, "length": int, "places": list})
    try:
        places = tuple((int(start), str(label)) for start, label in content["places"])
        patches = tuple(Patch(int(start), int(end), str(own)) for start, end, own in content.get("patches", ()))
        lacks = tuple(map(str, content.get("lacks", ())))
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): save the memory again") from None
    return Document(content["name"], file_text(text[: content["length"]], patches), places, patches, lacks)


def saved_lacks(folder: str | Path) -> tuple[str, ...]:
    """What the file did not give that a saved memory has read. Raises UserError for a damaged file."""
    document = saved_document(folder, "")
    return () if document is None else document.lacks


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
    before: int = 0,
) -> list[tuple[int, Document]]:
    """What a memory has read, each document with the character at which it begins in the text of the tokens.

    ids: all of it, which `decode` makes a text. given: what was read last (`as_read`), from the id `before` on. loaded:
    the folders of memories that had read what is before. starts: the first id of each text that was read alone.
    Texts of one folder, as of a memory that was joined and saved, are one.
    """
    if not loaded:
        return given.parts() if given is not None else []
    whole, found = decode(ids), list[tuple[int, Document]]()
    if len(starts) != len(loaded):  # of a memory that was joined and saved
        loaded, starts = [*loaded[:1]], (0,)
    known = ids if given is None else ids[:before]
    for folder, (at, own) in zip(loaded, placed(decode, known, starts), strict=True):
        document = saved_document(folder, own) or Document("" if len(loaded) == 1 else Path(folder).name, own)
        found += [(at + begin, part) for begin, part in document.parts()]
    if given is None:
        return found
    own = decode(ids[before:])
    begin = max(0, whole.find(own, len(decode(known)) - 8))  # some tokenizers write a space between two texts
    return found + [(begin + start, document) for start, document in given.parts()]


def as_files(
    text: str, documents: Sequence[tuple[int, Document]]
) -> tuple[str, list[tuple[int, Document]], Callable[[int], int]]:
    """The text of tokens with the documents in it as their files have them, where each begins there, and what gives the
    place there of a character of the tokens' text. documents: as of `documents_read`.
    """
    of_each = [(begin, document.patches) for begin, document in documents]
    patches = [Patch(begin + start, begin + end, own) for begin, patches in of_each for start, end, own in patches]
    places = Places(patches)
    return file_text(text, patches), [(places.in_file(begin), each) for begin, each in documents], places.in_file
