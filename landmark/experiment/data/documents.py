"""A folder of the user's own documents: files of text, PDF, EPUB, DOCX or HTML, or JSON lines with a `text`, as
RedPajama's data files have them.

Without folders for splits, splits are made: of every 50 documents (of all documents, if there are fewer than 50) the
first is in validation, the second in test, the others in train. One or two documents are split by length: the first
90 % of each is in train, the next 5 % in validation, the last 5 % in test, cut between words.
"""

import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from landmark.documents import Document, read_document
from landmark.experiment.data.sources import SPLITS, Source, existing_folder, fingerprint, json_texts, read_text
from landmark.utils.errors import UserError

EVERY = 50
ENDS = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}  # of documents that are split by length
_log = logging.getLogger(__name__)
_JSON = (".jsonl", ".jsonl.gz")
_READ = (".pdf", ".epub", ".docx", ".html", ".htm", ".xhtml")
_LAYOUT = (
    "*.txt, *.pdf, *.epub, *.docx, *.html, or *.jsonl (.gz or not) with a text a line, in train/, validation/ and "
    "test/ or without splits"
)


class Documents(Source):
    """Files in the order of their names, the documents of a file in the order of its lines."""

    name = "documents"

    def __init__(self, root: Path, files: list[Path] | None = None):
        """files: of the folder (None: all of text). Raises UserError if a split or every document is missing."""
        self.origin = str(root)
        self._root = root
        if files is None:
            files = [path for path in sorted(root.rglob("*")) if path.name.endswith((".txt", *_JSON, *_READ))]
        self._files = [path for path in files if path.is_file()]
        tops = {path.relative_to(root).parts[0] for path in self._files}
        self._every = None
        if not tops & set(SPLITS):
            self._every = min(EVERY, sum(1 for _ in islice(self._all(self._files), EVERY)))
        elif tops != set(SPLITS):
            raise UserError(f"documents: {root} holds {', '.join(sorted(tops))}: expected {', '.join(SPLITS)}")
        if self._every == 0:
            raise UserError(f"documents: {root} holds no document: {_LAYOUT}")
        self._by_length = self._every is not None and self._every < len(SPLITS)
        split = "by length" if self._by_length else self._every
        self.identity = {"corpus": self.name, "every": split, **fingerprint(root, self._files)}

    def documents(self, split: str) -> Iterator[Document]:
        if self._every is None:
            folder = self._root / split
            yield from self._all([path for path in self._files if path.is_relative_to(folder)])
            return
        if self._by_length:
            if split == "train":
                _log.info("%s has %d document(s): 90 %% of the text is train, then 5 %% each", self._root, self._every)
            for document in self._all(self._files):
                yield Document(document.name, _part(document.text, *ENDS[split]))
            return
        splits = {0: "validation", 1: "test"}
        for number, document in enumerate(self._all(self._files)):
            if splits.get(number % self._every, "train") == split:
                yield document

    def _all(self, files: list[Path]) -> Iterator[Document]:
        for path in files:
            name = path.relative_to(self._root).as_posix()
            if not path.name.endswith(_JSON):
                yield Document(name, read_document(path).text if path.suffix in _READ else read_text(path))
            else:
                yield from (Document(line, text) for line, text, _ in json_texts("documents", name, str(path)))


def make_source(path: Path | None) -> Documents:
    """The documents in a folder, or one file. Raises UserError if neither is given, or if it holds no document."""
    if path is None:
        raise UserError(f"data.path=null: name the folder of your documents: {_LAYOUT}")
    if path.expanduser().is_file():
        file = path.expanduser().resolve()
        return Documents(file.parent, [file])
    return Documents(existing_folder(path, _LAYOUT))


def _part(text: str, start: float, stop: float) -> str:
    """The text between two fractions of its length, each moved to the next white space."""

    def cut(fraction: float) -> int:
        space = re.compile(r"\s").search(text, round(fraction * len(text)))
        return len(text) if space is None else space.start()

    return text[cut(start) if start else 0 : cut(stop)]
