"""A corpus before tokenising: documents in a fixed order, three splits, and an identity."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from landmark.documents import Document
from landmark.documents.encoding import decode
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import open_written
from landmark.utils.trust import load_from_module

SPLITS = ("train", "validation", "test")


class Source:
    """A corpus that can be read. Its constructor checks that every split has documents, and reads no text. origin:
    place, for messages. identity: settings for JSON that change with the documents; they hold no path of this machine.
    """

    name: str
    origin: str
    identity: dict[str, Any]

    def documents(self, split: str) -> Iterator[Document]:
        """Documents in their fixed order, one in memory at a time."""
        raise NotImplementedError

    def num_bytes(self, split: str) -> int | None:
        """Expected bytes of text, for the progress bar; None: unknown."""
        return None

    def report(self) -> list[str]:
        """Lines on what was read and what was left out, after all splits were read."""
        return []


class FirstDocuments(Source):
    """The first `count` documents of each split of another source."""

    def __init__(self, source: Source, count: int):
        if count < 1:
            raise UserError(f"data.max_documents={count}: at least 1 is needed (null: all)")
        self._source, self._count = source, count
        self.name, self.origin = source.name, source.origin
        self.identity = {**source.identity, "max_documents": count}

    def documents(self, split: str) -> Iterator[Document]:
        return islice(self._source.documents(split), self._count)


def open_source(name: str, path: str | Path | None = None, **options: Any) -> Source:
    """The corpus of `landmark.experiment.data.<name>`. Raises UserError for an unknown name and missing documents."""
    make_source = load_from_module("landmark.experiment.data", name, "make_source", key="data.name")
    return make_source(None if path is None else Path(path), **options)


def existing_folder(path: Path, content: str) -> Path:
    """The absolute path of a folder. content: what it should hold, for the UserError if it is not a folder."""
    path = path.expanduser()
    if not path.is_dir():
        raise UserError(f"data.path: {path} is not a folder: give the folder that holds {content}")
    return path.resolve()


def fingerprint(root: Path, files: Iterable[Path]) -> dict[str, str | int]:
    """The number of files, and a hash of their names below `root`, sizes and modification times."""
    digest = hashlib.sha256()
    count = 0
    for file in files:
        status = file.stat()
        entry = f"{file.relative_to(root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(entry.encode("utf-8", "surrogateescape"))
        count += 1
    return {"files": count, "listing_sha256": digest.hexdigest()}


def read_text(file: Path) -> str:
    """A file's text with unchanged line ends. Raises UserError if it cannot be read, or its encoding is not sure."""
    with open_written(file, "take it out") as opened:
        content = opened.read()
    try:
        return decode(content)
    except ValueError as error:
        raise UserError(f"{file} {error}; or take it out") from None


def json_texts(corpus: str, name: str, place: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The JSON lines of a file: a name for each (`file:line`), its `text`, and the whole object. corpus, name: for
    messages. place: a path or hf://datasets/…, perhaps in .gz. Raises UserError for what cannot be read.
    """
    for number, line in _numbered_lines(corpus, place):
        try:
            record = json.loads(line)
            record["text"].encode()  # half a surrogate pair is no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f'{corpus}: {name}, line {number}: no JSON object with a "text" ({type(error).__name__}): '
                "mend or delete the line"
            ) from None
        yield f"{name}:{number}", record["text"], record


def _numbered_lines(corpus: str, place: str) -> Iterator[tuple[int, bytes]]:
    from fsspec.core import url_to_fs

    number = 0
    try:
        system, path = url_to_fs(place)
        with system.open(path, "rb", compression="infer") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except Exception as error:  # of many kinds: of the system, of gzip, of the hub
        reason = in_one_line(error)
        raise UserError(
            f"{corpus}: cannot read {place} from line {number + 1} on ({type(error).__name__}: {reason}): get it again"
            + ("" if "://" not in place else ", or set data.path to a local copy")
        ) from error
