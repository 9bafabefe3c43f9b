"""Preparing a corpus: tokenise every document in parallel, in constant memory, into one file per split.

The files are written to a temporary folder, which is renamed when all files are on disk; so a prepared folder is always
complete. The next preparation deletes the temporary folder of a killed one.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout
from tqdm import tqdm

from landmark.data.bytes_and_words import count_words
from landmark.data.sources import SPLITS, Document, FirstDocuments, Source, open_source
from landmark.data.stream import FORMAT, MANIFEST, VERIFIED, Corpus, open_corpus, remember_verified
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError
from landmark.utils.files import name_in_errors, sync_folder, write_json
from landmark.utils.hardware import cores

_log = logging.getLogger(__name__)
_In = TypeVar("_In")
_Out = TypeVar("_Out")

_CAPACITY = 2_000_000  # characters in memory per worker, so that others continue while one has a long document
_LEAST_SIZE = 10_000  # a shorter document counts as so many characters, because tiny ones take memory too


def prepare(
    name: str,
    tokenizer: Tokenizer,
    cache: str | Path,
    *,
    path: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    max_documents: int | None = None,
    progress: bool = True,
) -> Corpus:
    """Open a corpus as token streams; tokenise it first if it is not prepared yet.

    If several processes need the same corpus, one prepares it and the others wait.

    Args:
        name: module of `landmark.data` that reads the corpus.
        tokenizer: encodes the documents.
        cache: folder of prepared corpora.
        path: local copy of the corpus (None: the default of the corpus, such as the hub).
        options: of the corpus, as for `open_source`.
        workers: threads (None: one per core).
        max_documents: number of documents to take of each split, from the first on (None: all).
        progress: whether to show a progress bar.

    Raises UserError for a missing or empty corpus, and for a prepared file that was cut short or altered.
    """
    if workers is not None and workers < 1:
        raise UserError(f"data.workers={workers}: at least 1 is needed (null: one per core)")
    source = _source(name, path, options, max_documents)
    folder = _folder(source, tokenizer, Path(cache))
    if (folder / MANIFEST).exists():
        return open_corpus(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not (folder / MANIFEST).exists():
            _prepare(source, tokenizer, folder, workers or cores(), progress)
        return open_corpus(folder)


def find(
    name: str,
    tokenizer: Tokenizer,
    cache: str | Path,
    *,
    path: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    max_documents: int | None = None,
) -> Corpus | None:
    """Open a corpus if it is prepared; else None. Never tokenises or downloads.

    Args:
        name: module of `landmark.data` that reads the corpus.
        tokenizer: encodes the documents.
        cache: folder of prepared corpora.
        path: local copy of the corpus (None: the default of the corpus).
        options: of the corpus, as for `open_source`.
        max_documents: number of documents taken of each split (None: all).

    Raises UserError as `prepare` does.
    """
    folder = _folder(_source(name, path, options, max_documents), tokenizer, Path(cache))
    return open_corpus(folder) if (folder / MANIFEST).exists() else None


def _source(name: str, path: str | Path | None, options: Mapping[str, Any] | None, max_documents: int | None) -> Source:
    source = open_source(name, path, **(options or {}))
    return source if max_documents is None else FirstDocuments(source, max_documents)


def _folder(source: Source, tokenizer: Tokenizer, cache: Path) -> Path:
    decisive = {"format": FORMAT, "source": source.identity, "tokenizer": tokenizer.hash}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return cache.expanduser().absolute() / f"{source.name}-{tokenizer.name}-{digest[:10]}"


def _locked(folder: Path) -> AcquireReturnProxy:
    """The lock of a folder, for a with block; the system also releases it when the process dies."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _log.warning("another process is preparing %s: waiting for it", folder)
        return lock.acquire()


def _prepare(source: Source, tokenizer: Tokenizer, folder: Path, workers: int, progress: bool) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    started = time.monotonic()
    try:
        splits = {split: _write_split(source, split, tokenizer, partial, workers, progress) for split in SPLITS}
        manifest = {
            "format": FORMAT,
            "source": {**source.identity, "origin": source.origin},
            "tokenizer": {
                "name": tokenizer.name,
                "hash": tokenizer.hash,
                "vocab_size": tokenizer.vocab_size,
                "eot": tokenizer.eot,
                "landmark": tokenizer.landmark,
            },
            "dtype": tokenizer.dtype.str,
            "splits": splits,
            "seconds": round(time.monotonic() - started, 3),
        }
        write_json(partial / MANIFEST, manifest)
        remember_verified(partial)
        _discard_without_manifest(folder)
        os.rename(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _discard_without_manifest(folder: Path) -> None:
    """Delete the files of a prepared corpus whose manifest is gone. Raises UserError if there are other files."""
    if not folder.exists():
        return
    for file in [*(folder / f"{split}.bin" for split in SPLITS), folder / VERIFIED]:
        file.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:
        raise UserError(f"{folder} holds files that are not a prepared corpus: move them away") from None


def _write_split(
    source: Source, split: str, tokenizer: Tokenizer, folder: Path, workers: int, progress: bool
) -> dict[str, Any]:
    def tokenise(document: Document) -> tuple[np.ndarray, int, int]:
        text = document.text.encode()
        return tokenizer.encode(document.text), len(text), count_words(text)

    def size(document: Document) -> int:
        return max(len(document.text), _LEAST_SIZE)

    file = f"{split}.bin"
    end = np.array([tokenizer.eot], dtype=tokenizer.dtype).tobytes()
    digest = hashlib.sha256()
    tokens = documents = num_bytes = words = 0
    filled = (document for document in source.documents(split) if document.text)
    with (
        name_in_errors(folder / file),
        open(folder / file, "wb") as output,
        _bar(f"{source.name} {split}", source.num_bytes(split), progress) as bar,
    ):
        for ids, text_bytes, text_words in _map_in_order(tokenise, filled, workers, size, _CAPACITY * workers):
            for part in (ids.tobytes(), end):
                output.write(part)
                digest.update(part)
            tokens += len(ids) + 1
            documents += 1
            num_bytes += text_bytes
            words += text_words
            bar.set_postfix_str(f"{documents} documents, {tokens / 1e6:.1f} M tokens", refresh=False)
            bar.update(text_bytes)
        output.flush()
        os.fsync(output.fileno())
    if not documents:
        raise UserError(f"{source.name}: split {split!r} of {source.origin} has no text: every document is empty")
    return {
        "file": file,
        "tokens": tokens,
        "documents": documents,
        "bytes": num_bytes,
        "words": words,
        "sha256": digest.hexdigest(),
        **source.report(split),
    }


def _map_in_order(
    function: Callable[[_In], _Out], items: Iterable[_In], workers: int, size: Callable[[_In], int], capacity: int
) -> Iterator[_Out]:
    """Results in the order of the items.

    At most two items per worker are in memory, or more if their sizes add up to less than `capacity`.
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


def _bar(title: str, total: int | None, progress: bool) -> tqdm:
    return tqdm(
        desc=title,
        total=total,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=not progress,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )
