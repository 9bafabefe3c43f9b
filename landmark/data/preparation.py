"""Preparing a corpus: tokenise every document in parallel, in constant memory, into one file per split.

Processes of one machine, or of several that share the folder, prepare a corpus together (parts.py). The files are
written to a temporary folder, which is renamed when all are on disk; so a prepared folder is always complete.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from landmark.data.parts import Elsewhere, Parts
from landmark.data.sources import SPLITS, FirstDocuments, Source, open_source
from landmark.data.stream import FORMAT, MANIFEST, VERIFIED, Corpus, open_corpus, remember_verified
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError
from landmark.utils.files import sync_folder, write_json
from landmark.utils.hardware import cores

_log = logging.getLogger(__name__)


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

    If several processes need the same corpus, they share the work. After an error or a kill, parts that are done are
    not done again.

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
    _ = tokenizer.byte_lengths  # what it needs to encode is there, or is missed before anything is made
    folder.parent.mkdir(parents=True, exist_ok=True)
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


def _prepare(source: Source, tokenizer: Tokenizer, folder: Path, workers: int, progress: bool) -> None:
    partial = folder.with_name(f".{folder.name}.partial-{source.part}")
    partial.mkdir(exist_ok=True)
    try:
        _make(source, tokenizer, folder, partial, workers, progress)
    except Elsewhere:
        pass
    except BaseException:
        if not any(partial.glob("*.bin")):  # no part is done, or being done by another process
            shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial, ignore_errors=True)


def _make(source: Source, tokenizer: Tokenizer, folder: Path, partial: Path, workers: int, progress: bool) -> None:
    """Tokenise the parts together with other processes, and join them where no other process does."""

    @functools.cache
    def say_waiting() -> None:
        _log.warning("other processes are preparing %s too: waiting for them", folder)

    def is_over() -> bool:
        return (folder / MANIFEST).exists()

    splits = {split: Parts(source, split, tokenizer, partial, is_over) for split in SPLITS}
    for split, parts in splits.items():
        with _bar(f"{source.name} {split}", source.num_bytes(split), progress) as bar:
            parts.tokenise(workers, bar, say_waiting)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if is_over():
            return
        whole = partial / "whole"
        shutil.rmtree(whole, ignore_errors=True)  # of a process that was killed while it joined
        whole.mkdir()
        try:
            _join(source, tokenizer, splits, whole)
            _discard_without_manifest(folder)
            os.rename(whole, folder)
        except BaseException:
            shutil.rmtree(whole, ignore_errors=True)
            raise
        sync_folder(folder.parent)


def _join(source: Source, tokenizer: Tokenizer, splits: Mapping[str, Parts], folder: Path) -> None:
    """Write the files of a prepared corpus."""
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
        "splits": {split: parts.join(folder / f"{split}.bin") for split, parts in splits.items()},
    }
    write_json(folder / MANIFEST, manifest)
    remember_verified(folder)


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
