"""The parts of a split, which the processes of one machine or several tokenise in turn; joined they are its stream.

A part is a fixed number of documents, one after the other, so the stream is the same however many processes there are:

1. A process takes the first part that is not done and that no other process has locked, until it sees the last one.
2. It waits for the parts that others are working on, and takes over those of a process that died.
3. When all parts are done, any process joins them.

A finished part is a file of tokens and one of counts. It stays until the corpus is whole, also after an error or a
kill, so that preparing goes on where it stopped.
"""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from landmark.data.bytes_and_words import count_words
from landmark.data.sources import Document, Source
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError
from landmark.utils.files import name_in_errors, read_json, write_json

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_CAPACITY = 2_000_000  # characters in memory per worker, so that others continue while one has a long document
_LEAST_SIZE = 10_000  # a shorter document counts as so many characters, because tiny ones take memory too
_COUNTS = ("tokens", "documents", "bytes", "words")  # of a part, and of a stream
_COPIED_AT_ONCE = 1 << 24  # bytes


class Elsewhere(Exception):
    """Another process has joined the parts of all splits."""


class Parts:
    """The parts of one split, in a folder that all processes see."""

    def __init__(self, source: Source, split: str, tokenizer: Tokenizer, folder: Path, is_over: Callable[[], bool]):
        """
        Args:
            source: of the documents.
            split: which of its splits.
            tokenizer: encodes the documents.
            folder: of the parts.
            is_over: whether another process has finished the corpus, after which the folder is gone.
        """
        self._source, self._split, self._tokenizer, self._folder = source, split, tokenizer, folder
        self._is_over = is_over
        self._documents: Iterator[Document] = iter(())
        self._read = -1  # documents that were read; −1: not begun
        self._shown: Counter[str] = Counter()  # of all parts so far, for the progress bar

    def tokenise(self, workers: int, bar: tqdm, say_waiting: Callable[[], object]) -> None:
        """Return when every part is done. Raises Elsewhere where another process finishes the corpus meanwhile.

        Args:
            workers: threads.
            bar: shows the progress, parts of other processes included.
            say_waiting: called before waiting for other processes.
        """
        ends: dict[int, bool] = {}  # by the numbers of parts that are done
        for waits in (False, True):
            number = 0
            while number == 0 or not ends.get(number - 1, False):
                if number not in ends:
                    with self._while_it_lasts():
                        entry = self._done(number, bar) or self._work(number, workers, bar, waits, say_waiting)
                    if entry is not None:
                        ends[number] = entry["is_last"]
                number += 1

    def join(self, target: Path) -> dict[str, Any]:
        """Write the stream from its parts, which are all done. Returns its counts for the manifest.

        Raises UserError where no document has text.
        """
        done: list[dict[str, Any]] = []
        while not done or not done[-1]["is_last"]:
            done.append(read_json(self._file(len(done)).with_suffix(".json")))
        filled = [(self._file(number), entry) for number, entry in enumerate(done) if entry["tokens"]]
        if not filled:
            where = f"{self._source.name}: split {self._split!r} of {self._source.origin}"
            raise UserError(f"{where} has no text: every document is empty")
        if len(filled) == 1:
            _link(filled[0][0], target)
            sha256 = filled[0][1]["sha256"]
        else:
            sha256 = _concatenate([file for file, _ in filled], target)
        counts = {name: sum(entry[name] for entry in done) for name in _COUNTS}
        return {"file": target.name, **counts, "sha256": sha256, **done[-1]["report"]}

    @contextmanager
    def _while_it_lasts(self) -> Iterator[None]:
        """Raise Elsewhere for an error that comes because another process has finished and removed the folder."""
        try:
            yield
        except (FileNotFoundError, UserError):
            if self._is_over():
                raise Elsewhere from None
            raise

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._split}-{number:06d}.bin"

    def _done(self, number: int, bar: tqdm) -> dict[str, Any] | None:
        """The counts of a part that was done before, or by another process; None: it is not done."""
        file = self._file(number).with_suffix(".json")
        if not file.exists():
            return None
        entry = read_json(file)
        self._show({name: entry[name] for name in _COUNTS}, bar)
        return entry

    def _show(self, counts: dict[str, int], bar: tqdm) -> None:
        """Add documents to the progress."""
        self._shown.update(counts)
        shown = f"{self._shown['documents']} documents, {self._shown['tokens'] / 1e6:.1f} M tokens"
        bar.set_postfix_str(shown, refresh=False)
        bar.update(counts["bytes"])

    def _work(
        self, number: int, workers: int, bar: tqdm, waits: bool, say_waiting: Callable[[], object]
    ) -> dict[str, Any] | None:
        """Tokenise a part. Returns its counts; None: another process is at it, and this one does not wait."""
        lock = FileLock(self._file(number).with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not waits:
                return None
            say_waiting()
            lock.acquire()
        try:
            if self._is_over():
                raise Elsewhere
            return self._done(number, bar) or self._write(number, workers, bar)
        finally:
            lock.release()

    def _write(self, number: int, workers: int, bar: tqdm) -> dict[str, Any]:
        tokenizer, file = self._tokenizer, self._file(number)
        end, digest = np.array([tokenizer.eot], dtype=tokenizer.dtype).tobytes(), hashlib.sha256()
        counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))

        def tokenise(document: Document) -> tuple[np.ndarray, int, int]:
            text = document.text.encode()
            return tokenizer.encode(document.text), len(text), count_words(text)

        def size(document: Document) -> int:
            return max(len(document.text), _LEAST_SIZE)

        try:
            with name_in_errors(file), open(file, "wb") as output:
                filled = (document for document in self._documents_of(number) if document.text)
                for ids, text_bytes, text_words in map_in_order(tokenise, filled, workers, size, _CAPACITY * workers):
                    for part in (ids.tobytes(), end):
                        output.write(part)
                        digest.update(part)
                    added = {"tokens": len(ids) + 1, "documents": 1, "bytes": text_bytes, "words": text_words}
                    counts.update(added)
                    self._show(added, bar)
                output.flush()
                os.fsync(output.fileno())
            is_last = self._read < (number + 1) * self._source.part
            report = self._source.report(self._split) if is_last else {}  # all documents are read then
            entry = {**counts, "sha256": digest.hexdigest(), "is_last": is_last, "report": report}
            write_json(file.with_suffix(".json"), entry)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return entry

    def _documents_of(self, number: int) -> Iterator[Document]:
        """The documents of a part; those before it are read and left out."""
        first = number * self._source.part
        if not 0 <= self._read <= first:
            self._documents, self._read = self._source.documents(self._split), 0
        while self._read < first + self._source.part:
            document = next(self._documents, None)
            if document is None:
                return
            self._read += 1
            if self._read > first:
                yield document


def _link(file: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no such names."""
    try:
        os.link(file, target)
    except OSError:
        _concatenate([file], target)


def _concatenate(files: Iterable[Path], target: Path) -> str:
    """Write the files one after the other into one. Returns its SHA-256."""
    digest = hashlib.sha256()
    with name_in_errors(target), open(target, "wb") as output:
        for file in files:
            with open(file, "rb") as part:
                while chunk := part.read(_COPIED_AT_ONCE):
                    output.write(chunk)
                    digest.update(chunk)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()


def map_in_order(
    function: Callable[[_In], _Out], items: Iterable[_In], workers: int, size: Callable[[_In], int], capacity: int
) -> Iterator[_Out]:
    """Results in the order of the items, a few of which are in memory at a time.

    Args:
        function: gives the result of an item.
        items: read as they are needed.
        workers: threads.
        size: of an item.
        capacity: more than two items per worker are in memory only while their sizes add up to less than this.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[Future[_Out], int]] = deque()
        total = 0
        try:
            for item in items:
                waiting.append((pool.submit(function, item), size(item)))
                total += size(item)
                while len(waiting) >= 2 * workers and total >= capacity:
                    future, freed = waiting.popleft()
                    total -= freed
                    yield future.result()
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            pool.shutdown(cancel_futures=True)
