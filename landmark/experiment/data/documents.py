"""A folder of the user's own documents: files of text, Markdown, PDF, EPUB, DOCX or HTML, or JSON lines with a `text`,
as RedPajama's data files have them.

Without folders for splits, splits are made, by length: the first 90 % of each document is in train, the next 5 % in
validation, the last 5 % in test, cut between words. Many documents stay whole: of every 50 the first is in validation,
the second in test, if these then have a fair share of the text.
"""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

from landmark.documents import Document, TextlessError, read_document
from landmark.experiment.data.sources import SPLITS, Source, existing_folder, fingerprint, json_texts, read_text
from landmark.utils.errors import UserError, counted

EVERY = 50
FAIR = 0.01, 0.1  # share of the text that whole documents held out for one split have
SAMPLE = 100 * EVERY  # documents that are looked at for it
ENDS = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}  # of documents that are split by length
NEAR = 100  # characters after which a cut is made within a word
_JSON = (".jsonl", ".jsonl.gz")
_PLAIN = (".txt", ".md", ".markdown")
_READ = (".pdf", ".epub", ".docx", ".html", ".htm", ".xhtml")
_LAYOUT = (
    "*.txt, *.md, *.pdf, *.epub, *.docx, *.html, or *.jsonl (.gz or not) with a text a line, in train/, validation/ "
    "and test/ or without splits"
)
_KEPT = 1 << 28  # characters of converted files that are kept: each split goes through all of them
_NAMED = 8  # files that a line names


class Documents(Source):
    """Files in the order of their names, the documents of a file in the order of its lines."""

    name = "documents"

    def __init__(self, root: Path, files: list[Path] | None = None):
        """files: of the folder (None: all of them). Raises UserError if a split or every document is missing."""
        self.origin = str(root)
        self._root = root
        self._documents: dict[str, int] = {}  # by file, when it has been read
        self._left_out: dict[str, str] = {}  # why, by file
        self._converted: dict[Path, str] = {}  # the texts of files that are no plain text
        self._room = _KEPT
        self._files = _visible(root) if files is None else files
        if files is None:
            self._leave_out(
                lambda path: path.name.lower().endswith((*_PLAIN, *_JSON, *_READ)), "is of no kind that is read"
            )
        tops = {self._name(path).partition("/")[0] for path in self._files}
        self._has_splits = bool(tops & set(SPLITS))
        if self._has_splits:
            if not tops >= set(SPLITS):
                raise UserError(f"documents: {root} holds {', '.join(sorted(tops))}: expected {', '.join(SPLITS)}")
            self._leave_out(lambda path: self._name(path).partition("/")[0] in SPLITS, f"is not in {', '.join(SPLITS)}")
        if not self._files:
            raise UserError(f"documents: {root} holds no document: {_LAYOUT}")
        split = None if self._has_splits else f"{EVERY}, or by length"
        self.identity = {"corpus": self.name, "every": split, **fingerprint(root, self._files)}

    def documents(self, split: str) -> Iterator[Document]:
        if self._has_splits:
            folder = self._root / split
            yield from self._all([path for path in self._files if path.is_relative_to(folder)])
        elif self._is_split_by_length:
            for document in self._all(self._files):
                yield Document(document.name, _part(document.text, *ENDS[split]))
        else:
            splits = {0: "validation", 1: "test"}
            for number, document in enumerate(self._all(self._files)):
                if splits.get(number % EVERY, "train") == split:
                    yield document

    def report(self) -> list[str]:
        documents = sum(self._documents.values())
        said = f"read {counted(documents, 'document')} in {counted(len(self._documents), 'file')} ({{}})"
        how = "each is cut: 90 % to train, then 5 % to validate, and 5 % to test"
        if self._has_splits:
            how = "in folders for each split"
        elif not self._is_split_by_length:
            how = f"of every {EVERY} one is whole in validation, and one in test"
        lines = [f"{self._root}: {said.format(_names(list(self._documents)))}; {how}"]
        for reason in dict.fromkeys(self._left_out.values()):
            names = [name for name, why in self._left_out.items() if why == reason]
            lines.append(f"left out, {reason}: {_names(names)}")
        return lines

    @cached_property
    def _is_split_by_length(self) -> bool:
        """Unless there are many documents, and whole ones that are held out have a fair share of the text."""
        lengths = [len(document.text) for document in islice(self._all(self._files), SAMPLE)]
        shares = [sum(lengths[first::EVERY]) / max(1, sum(lengths)) for first in (0, 1)]
        return len(lengths) < EVERY or not all(FAIR[0] <= share <= FAIR[1] for share in shares)

    def _all(self, files: list[Path]) -> Iterator[Document]:
        """Those that have text. Raises UserError where there is none."""
        for path in files:
            name, count = self._name(path), 0
            if name in self._left_out:
                continue
            reason = "has no text" if path.stat().st_size else "is empty"
            try:
                for document in self._documents_of(path, name):
                    if document.text.strip():
                        count += 1
                        yield document
            except TextlessError as error:
                reason = str(error).removeprefix(f"{path}: ")
            if count:
                self._documents[name] = count
            else:
                self._left_out[name] = reason
        names = [self._name(path) for path in files]
        if self._left_out.keys() >= set(names):
            said = _names([f"{name} {self._left_out[name]}" for name in names])
            raise UserError(f"documents: {self._root} has no text to split: {said}")

    def _documents_of(self, path: Path, name: str) -> Iterator[Document]:
        if path.name.lower().endswith(_JSON):
            yield from (Document(line, text) for line, text, _ in json_texts("documents", name, str(path)))
        else:
            is_text = path.suffix.lower() not in _READ
            yield Document(name, read_text(path) if is_text else self._converted_text(path))

    def _converted_text(self, path: Path) -> str:
        if (text := self._converted.get(path)) is None:
            text = read_document(path).text
            if len(text) <= self._room:
                self._converted[path], self._room = text, self._room - len(text)
        return text

    def _leave_out(self, is_kept: Callable[[Path], bool], reason: str) -> None:
        self._left_out |= {self._name(path): reason for path in self._files if not is_kept(path)}
        self._files = [path for path in self._files if is_kept(path)]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def make_source(path: Path | None) -> Documents:
    """The documents in a folder, or one file. Raises UserError if neither is given, or if it holds no document."""
    if path is None:
        raise UserError(f"data.path=null: name the folder of your documents: {_LAYOUT}")
    if path.expanduser().is_file():
        file = path.expanduser().resolve()
        return Documents(file.parent, [file])
    return Documents(existing_folder(path, _LAYOUT))


def _visible(root: Path) -> list[Path]:
    """The files below a folder, but hidden ones."""
    found = sorted(root.rglob("*"))
    return [path for path in found if path.is_file() and not any(map(_is_hidden, path.relative_to(root).parts))]


def _is_hidden(part: str) -> bool:
    return part.startswith(".")


def _names(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f", and {more:,} more" if more > 0 else "")


def _part(text: str, start: float, stop: float) -> str:
    """The text between two fractions of its length, each moved to the next white space if that is near."""

    def cut(fraction: float) -> int:
        at = round(fraction * len(text))
        space = re.compile(r"\s").search(text, at, at + NEAR)
        return at if space is None else space.start()

    return text[cut(start) if start else 0 : cut(stop)]
