"""PG-19, books of Project Gutenberg: in its raw layout, or in parquet files with one book in each row."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.data.sources import SPLITS, Document, Source, existing_folder, fingerprint, read_text
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

HUB_NAME = "emozilla/pg19"
_LAYOUT = "train/, validation/ and test/ with one <id>.txt for each book, or parquet files named after their split"


def make_source(path: Path | None) -> Source:
    """PG-19 from the Hugging Face hub, or a local folder in the raw layout or of parquet files."""
    if path is None:
        return ParquetBooks()
    root = existing_folder(path, _LAYOUT)
    if any((root / split).is_dir() for split in SPLITS):
        return RawBooks(root)
    if any(root.rglob("*.parquet")):
        return ParquetBooks(root)
    raise UserError(f"data.path: {root} holds no PG-19 corpus: expected {_LAYOUT}")


class RawBooks(Source):
    """`<root>/{train,validation,test}/<number>.txt`, books in the order of their Gutenberg numbers."""

    name = "pg19"

    def __init__(self, root: Path):
        self.origin = str(root)
        self._files = {split: self._books(root, split) for split in SPLITS}
        listing = fingerprint(root, (file for split in SPLITS for file in self._files[split]))
        self.identity = {"corpus": self.name, "layout": "raw", **listing}

    @staticmethod
    def _books(root: Path, split: str) -> list[Path]:
        files = [file for file in (root / split).glob("*.txt") if not file.name.startswith(".")]
        if not files:
            raise UserError(f"pg19: {root / split} is missing or holds no .txt file: each split needs a book")
        for file in files:
            if not file.stem.isdecimal():
                raise UserError(f"pg19: {file} is not named <number>.txt: rename it or take it out")
        return sorted(files, key=lambda file: (int(file.stem), file.name))

    def documents(self, split: str) -> Iterator[Document]:
        for file in self._files[split]:
            yield Document(file.stem, read_text(file))

    def num_bytes(self, split: str) -> int:
        return sum(file.stat().st_size for file in self._files[split])


class ParquetBooks(Source):
    """Rows with the columns `text` and `url`, from the hub or from a folder; the url ends in the book's number.

    `datasets` converts the parquet files to Arrow files in its own cache (11.5 GB for PG-19) and maps them into memory,
    so that reading in any order takes constant memory. Downloaded files are kept.
    """

    name = "pg19"

    def __init__(self, root: Path | None = None):
        self.origin = HUB_NAME if root is None else str(root)
        self._files: dict[str, list[str]] | None = None
        self.identity = {"corpus": self.name, "layout": "parquet"}
        if root is None:
            self.identity |= {"hub": HUB_NAME}
            return
        files = {split: self._split_files(root, split) for split in SPLITS}
        self.identity |= fingerprint(root, (file for split in SPLITS for file in files[split]))
        self._files = {split: [str(file) for file in files[split]] for split in SPLITS}

    @staticmethod
    def _split_files(root: Path, split: str) -> list[Path]:
        pattern = re.compile(rf"(^|[^a-z]){split}([^a-z]|$)")
        files = [file for file in root.rglob("*.parquet") if pattern.search(file.relative_to(root).as_posix())]
        if not files:
            raise UserError(f"pg19: {root} holds no parquet file of split {split!r}: each split needs one")
        return sorted(files)

    @cached_property
    def _splits(self) -> dict[str, "Dataset"]:
        import datasets

        try:
            if self._files is None:
                loaded: Any = datasets.load_dataset(HUB_NAME)
            else:
                loaded = datasets.load_dataset("parquet", data_files=self._files)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            remedy = "; or set data.path to a local copy" if self._files is None else ""
            raise UserError(
                f"pg19: {self.origin} could not be loaded ({type(error).__name__}: {reason}): try again{remedy}"
            ) from error
        for split in SPLITS:
            if split not in loaded or not len(loaded[split]):
                raise UserError(f"pg19: split {split!r} of {self.origin} is missing or empty")
            if missing := {"text", "url"} - set(loaded[split].column_names):
                raise UserError(f"pg19: split {split!r} of {self.origin} has no column {sorted(missing)[0]!r}")
        return {split: loaded[split] for split in SPLITS}

    def documents(self, split: str) -> Iterator[Document]:
        table = self._splits[split]
        numbers = [self._number(url, split, row) for row, url in enumerate(table["url"])]
        rows = sorted(range(len(numbers)), key=lambda row: (numbers[row], row))
        texts = table.select_columns(["text"])
        for row in rows:
            yield Document(str(numbers[row]), texts[row]["text"])

    def _number(self, url: str | None, split: str, row: int) -> int:
        found = re.search(r"(\d+)/?$", url or "")
        if not found:
            raise UserError(f"pg19: row {row} of split {split!r} of {self.origin}: url {url!r} ends in no book number")
        return int(found[1])

    def num_bytes(self, split: str) -> int | None:
        return getattr(self._splits[split].info.splits.get(split), "num_bytes", None)  # pyright: ignore[reportOptionalMemberAccess]
