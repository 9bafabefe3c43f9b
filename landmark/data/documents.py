"""A folder of the user's own documents: text files, or JSON lines with a `text`, as RedPajama's data files have them.

Without folders for splits, splits are made: of every 50 documents (of all documents, if there are fewer than 50) the
first is in validation, the second in test, the others in train.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from landmark.data.sources import SPLITS, Document, Source, existing_folder, fingerprint, numbered_lines, read_text
from landmark.utils.errors import UserError

EVERY = 50
_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")
_LAYOUT = "*.txt or *.jsonl (.gz or not) with a text a line, in train/, validation/ and test/ or without splits"


class Documents(Source):
    """Files in the order of their names, the documents of a file in the order of its lines."""

    name = "documents"

    def __init__(self, root: Path):
        """Raises UserError if a split is missing, or if there are fewer documents than splits."""
        self.origin = str(root)
        self._root = root
        self._files = [path for path in sorted(root.rglob("*")) if path.name.endswith(_SUFFIXES) and path.is_file()]
        tops = {path.relative_to(root).parts[0] for path in self._files}
        self._every = None
        if not tops & set(SPLITS):
            self._every = min(EVERY, sum(1 for _ in islice(self._all(self._files), EVERY)))
        elif tops != set(SPLITS):
            raise UserError(f"documents: {root} holds {', '.join(sorted(tops))}: expected {', '.join(SPLITS)}")
        if self._every is not None and self._every < len(SPLITS):
            raise UserError(f"documents: {root} holds {self._every} documents, 3 at least are needed: {_LAYOUT}")
        self.identity = {"corpus": self.name, "every": self._every, **fingerprint(root, self._files)}

    def documents(self, split: str) -> Iterator[Document]:
        if self._every is None:
            folder = self._root / split
            yield from self._all([path for path in self._files if path.is_relative_to(folder)])
            return
        place = {"validation": 0, "test": 1}
        for number, document in enumerate(self._all(self._files)):
            if number % self._every == place.get(split, -1) or (split == "train" and number % self._every > 1):
                yield document

    def _all(self, files: list[Path]) -> Iterator[Document]:
        for path in files:
            name = path.relative_to(self._root).as_posix()
            if path.suffix == ".txt":
                yield Document(name, read_text(path))
            else:
                yield from _lines(path, name)


def make_source(path: Path | None) -> Documents:
    """The documents in a folder. Raises UserError if no folder is given, or if it holds too few documents."""
    if path is None:
        raise UserError(f"data.path=null: name the folder of your documents: {_LAYOUT}")
    return Documents(existing_folder(path, _LAYOUT))


def _lines(path: Path, name: str) -> Iterator[Document]:
    for number, line in numbered_lines("documents", path):
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError("its text is not a string")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'documents: {name}, line {number}: no JSON object with a "text" ({type(error).__name__}): '
                "mend or delete the line"
            ) from None
        yield Document(f"{name}:{number}", text)
