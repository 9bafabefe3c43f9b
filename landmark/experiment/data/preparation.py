"""Preparing a corpus: documents are tokenised in threads, in constant memory, into one file for each split. Others that
need the same corpus wait. A folder with a manifest is always whole; what a kill has left is made anew.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from landmark.experiment.data.sources import SPLITS, Document, FirstDocuments, Source, open_source
from landmark.experiment.data.stream import FORMAT, MANIFEST, VERIFIED, Corpus, open_corpus, remember_verified
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError
from landmark.utils.files import held_lock, name_in_errors, sealed, write_json
from landmark.utils.hardware import cores
from landmark.utils.progress import new_bar

TEXTS = "texts_sha256"  # of a split in the manifest: hash of its documents' hashes
_CAPACITY = 2_000_000  # characters in memory per core
_LEAST_SIZE = 10_000  # a shorter document counts as so many characters, because tiny ones take memory too
_log = logging.getLogger(__name__)


def prepare(
    name: str,
    tokenizer: Tokenizer,
    cache: str | Path,
    *,
    path: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    max_documents: int | None = None,
    progress: bool = True,
) -> Corpus:
    """Open a corpus as token streams; tokenise it first if it is not prepared yet.

    name: module of `landmark.experiment.data` that reads it. cache: folder of prepared corpora. path: local copy, or a
    folder where it was prepared (None: the corpus's default). options: as for `open_source`. max_documents: of each
    split, the first (None: all). Raises UserError for a missing or empty corpus, and a prepared file that is cut
    short or altered.
    """
    folder, source = _place(name, tokenizer, cache, path, options, max_documents)
    if source is not None and not (folder / MANIFEST).exists():
        _ = tokenizer.byte_lengths  # what it needs to encode is there, or is missed before anything is made
        folder.parent.mkdir(parents=True, exist_ok=True)
        wait = lambda: _log.warning("another process is preparing %s: waiting for it", folder)  # noqa: E731
        with held_lock(folder.with_name(f".{folder.name}.lock"), wait):
            if not (folder / MANIFEST).exists():
                _write_corpus(source, tokenizer, folder, progress)
    return _open(folder, tokenizer)


def find(name: str, tokenizer: Tokenizer, cache: str | Path, **source: Any) -> Corpus | None:
    """Open a corpus if it is prepared; else None. Never tokenises or downloads. Arguments and errors of `prepare`."""
    folder, _ = _place(name, tokenizer, cache, **source)
    return _open(folder, tokenizer) if (folder / MANIFEST).exists() else None


def check_texts(name: str, tokenizer: Tokenizer, cache: str | Path, **source: Any) -> bool:
    """Read the files of a prepared corpus again, and compare the hash of their texts; of which otherwise names, sizes
    and modification times are compared. Returns whether that could be done. Arguments of `prepare`. Raises UserError
    where a text has changed.
    """
    folder, opened = _place(name, tokenizer, cache, **source)
    splits = _open(folder, tokenizer).manifest["splits"]
    if opened is None or "listing_sha256" not in opened.identity or any(TEXTS not in each for each in splits.values()):
        return False
    for split, entry in splits.items():
        digest = hashlib.sha256()
        for document in opened.documents(split):
            if document.text:
                digest.update(hashlib.sha256(document.text.encode()).digest())
        if digest.hexdigest() != entry[TEXTS]:
            raise UserError(
                f"{opened.origin}: texts of the split {split} have changed since {folder} was prepared, though names, "
                f"sizes and times of the files are the same: delete {folder} and prepare it again"
            )
    return True


def _place(
    name: str,
    tokenizer: Tokenizer,
    cache: str | Path,
    path: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    max_documents: int | None = None,
) -> tuple[Path, Source | None]:
    """The folder of a prepared corpus, and what it is made of; None where `path` is such a folder."""
    if path is not None and (Path(path) / MANIFEST).is_file():
        return Path(path), None
    source = open_source(name, path, **(options or {}))
    if max_documents is not None:
        source = FirstDocuments(source, max_documents)
    decisive = {"format": FORMAT, "source": source.identity, "tokenizer": tokenizer.hash}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return Path(cache).expanduser().absolute() / f"{source.name}-{tokenizer.name}-{digest[:10]}", source


def _open(folder: Path, tokenizer: Tokenizer) -> Corpus:
    corpus = open_corpus(folder)
    if corpus.manifest["tokenizer"].get("hash") != tokenizer.hash:
        raise UserError(
            f"data.path: {folder} was prepared with another tokenizer than {tokenizer.name}: name the folder of the "
            "texts"
        )
    return corpus


def _write_corpus(source: Source, tokenizer: Tokenizer, folder: Path, progress: bool) -> None:
    folder.mkdir(exist_ok=True)
    try:
        splits = {split: _write_split(source, split, tokenizer, folder, progress) for split in SPLITS}
        for line in source.report():
            _log.info(line)
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
        }
        remember_verified(folder)
        write_json(folder / MANIFEST, sealed(manifest))
    except BaseException:
        for name in (MANIFEST, *(f"{split}.bin" for split in SPLITS), VERIFIED):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # where others keep files in it
            folder.rmdir()
        raise


def _write_split(source: Source, split: str, tokenizer: Tokenizer, folder: Path, progress: bool) -> dict[str, Any]:
    """Write the stream of a split. Returns its entry of the manifest. Raises UserError where no document has text."""
    file, digest, texts = folder / f"{split}.bin", hashlib.sha256(), hashlib.sha256()
    end = np.array([tokenizer.eot], dtype=tokenizer.dtype).tobytes()
    counts = Counter(dict.fromkeys(("tokens", "documents", "bytes", "words"), 0))

    def tokenise(document: Document) -> tuple[np.ndarray, bytes, int, int]:
        text = document.text.encode()
        return tokenizer.encode(document.text), hashlib.sha256(text).digest(), len(text), len(document.text.split())

    filled = (document for document in source.documents(split) if document.text)
    in_all = source.num_bytes(split)
    bar = new_bar(f"{source.name} {split}", total=in_all, unit="B", unit_scale=True, disable=not progress)
    file.unlink(missing_ok=True)  # what stands there may be a pipe, or a link to a file of somebody's
    with bar, name_in_errors(file), open(file, "wb") as output, ThreadPoolExecutor(cores()) as pool:
        batches = batches_of(filled, _CAPACITY * cores())
        for ids, text_sha256, num_bytes, words in (done for batch in batches for done in pool.map(tokenise, batch)):
            for part in (ids.tobytes(), end):
                output.write(part)
                digest.update(part)
            texts.update(text_sha256)
            counts.update(tokens=len(ids) + 1, documents=1, bytes=num_bytes, words=words)
            shown = f"{counts['documents']} documents, {counts['tokens'] / 1e6:.1f} M tokens"
            bar.set_postfix_str(shown, refresh=False)
            bar.update(num_bytes)
        output.flush()
        os.fsync(output.fileno())
    if not counts["documents"]:
        raise UserError(
            f"{source.name}: split {split!r} of {source.origin} has no text: its documents are empty or too short"
        )
    return {"file": file.name, **counts, "sha256": digest.hexdigest(), TEXTS: texts.hexdigest()}


def batches_of(documents: Iterable[Document], most: int) -> Iterator[list[Document]]:
    """Documents in their order, those of a batch together of about `most` characters."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += max(len(document.text), _LEAST_SIZE)
        if size >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
