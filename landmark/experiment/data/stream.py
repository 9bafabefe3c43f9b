"""A prepared corpus on disk: one file of raw token ids per split, and a manifest that describes them."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from landmark.utils.errors import UserError
from landmark.utils.files import check_keys, open_written, read_json, read_sealed, write_json
from landmark.utils.trust import inside

FORMAT = 1
DTYPES = ("<u2", "<u4")
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
_OF_SPLIT = {"file": str, "tokens": int, "sha256": str, "documents": int, "bytes": int, "words": int}


@dataclass(frozen=True, eq=False)
class Stream:
    """One split: raw ids (N,), uint16 or uint32, mapped into memory, documents with end of text. sha256: of bytes."""

    tokens: np.ndarray = field(repr=False)
    sha256: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared folder of streams. manifest: source, tokenizer, hashes, and sizes in bytes, words and documents."""

    folder: Path
    manifest: dict[str, Any] = field(repr=False)

    def split(self, name: str) -> Stream:
        """The stream of a split. Raises UserError for an unknown split."""
        if name not in self.manifest["splits"]:
            raise UserError(f"unknown split {name!r}: choose one of {', '.join(self.manifest['splits'])}")
        entry = self.manifest["splits"][name]
        tokens = np.memmap(inside(self.folder, entry["file"]), dtype=self.manifest["dtype"], mode="r")
        return Stream(tokens, entry["sha256"])


def open_corpus(folder: str | Path) -> Corpus:
    """Open a prepared corpus. Raises UserError for a file that is missing, cut short, altered or not in the folder;
    hashes are checked the first time, and again if a file's times have changed.
    """
    folder = Path(folder)
    remedy = f"delete {folder} and prepare it again"
    manifest = read_sealed(folder / MANIFEST, {"format": int, "dtype": str, "tokenizer": dict, "splits": dict}, remedy)
    if manifest["format"] != FORMAT:
        raise UserError(f"{folder / MANIFEST} is of another version: {remedy}")
    check_keys(manifest["tokenizer"], {"vocab_size": int}, f"{folder / MANIFEST}: tokenizer", remedy)
    for name, entry in manifest["splits"].items():
        check_keys(entry, _OF_SPLIT, f"{folder / MANIFEST}: splits.{name}", remedy)
    if manifest["dtype"] not in DTYPES:
        raise UserError(f"{folder / MANIFEST}: dtype={manifest['dtype']!r} must be one of {', '.join(DTYPES)}")
    known, stamps = {}, {}
    with suppress(UserError):  # none are known
        known = read_json(folder / VERIFIED, {})
    for name, entry in manifest["splits"].items():
        path, dtype = inside(folder, entry["file"]), np.dtype(manifest["dtype"])
        if entry["tokens"] < 1:
            raise UserError(f"{folder / MANIFEST}: splits.{name} has no token: {remedy}")
        is_known = known.get(entry["file"]) == _stamp(path)
        expected = None if is_known else entry["sha256"]
        open_written(path, remedy, size=entry["tokens"] * dtype.itemsize, sha256=expected, named=MANIFEST).close()
        if not is_known and (most := int(np.memmap(path, dtype, "r").max())) >= manifest["tokenizer"]["vocab_size"]:
            raise UserError(f"{path} has the id {most}, which its tokenizer does not have: {remedy}")
        stamps[entry["file"]] = _stamp(path)
    if stamps != known:
        remember_verified(folder, stamps)
    return Corpus(folder, manifest)


def remember_verified(folder: Path, stamps: dict[str, Any] | None = None) -> None:
    """Write down that the files in their present state have the hashes of the manifest. stamps: sizes and times."""
    if stamps is None:
        stamps = {file.name: _stamp(file) for file in sorted(folder.glob("*.bin"))}
    with suppress(OSError):  # a read-only folder is hashed every time
        write_json(folder / VERIFIED, stamps)


def _stamp(path: Path) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:  # `open_written` says what there is
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
