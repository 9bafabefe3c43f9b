"""A corpus before tokenising: documents in a fixed order, three splits, and an identity."""

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from landmark.utils.errors import UserError
from landmark.utils.extensions import load_extension

SPLITS = ("train", "validation", "test")


class Document(NamedTuple):
    """One document of a corpus. name: tells it from the others of its split."""

    name: str
    text: str


class Source:
    """A corpus that can be read. Its constructor checks that every split has documents, and reads no text.

    name: name of the corpus. origin: where it is read from, for messages and the manifest. identity: settings for JSON
    that change if the documents change; they hold no path of this machine.
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

    def report(self, split: str) -> dict[str, Any]:
        """Further counts for the manifest, once the split has been read."""
        return {}


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

    def report(self, split: str) -> dict[str, Any]:
        return self._source.report(split)


def open_source(name: str, path: str | Path | None = None, **options: Any) -> Source:
    """The corpus that `make_source` of the module `landmark.data.<name>` returns, read from `path` if it is given.

    options: `configs` and `bad_lines` of arxiv_math. Raises UserError for an unknown name, a missing folder, and a
    split without documents.
    """
    make_source = load_extension("landmark.data", name, "make_source", key="data.name")
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
    """A file's text with unchanged line ends. Raises UserError if it cannot be read or is not UTF-8."""
    try:
        return file.read_bytes().decode("utf-8-sig")  # a mark of the byte order is no text
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}): convert it or take it out") from None


def numbered_lines(corpus: str, path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, gzipped if it ends in .gz, numbered from 1; blank lines are left out.

    Raises UserError, naming the corpus, if the file cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{corpus}: cannot read {path} ({error}): get it again") from None
