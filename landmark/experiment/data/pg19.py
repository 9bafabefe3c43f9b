"""PG-19, books of Project Gutenberg: in its raw layout, or from the hub."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from landmark.experiment.data.sources import SPLITS, Document, Source, existing_folder, fingerprint, read_text
from landmark.utils.errors import UserError, in_one_line

if TYPE_CHECKING:
    from datasets import Dataset

HUB_NAME = "emozilla/pg19"
_LAYOUT = "train/, validation/ and test/ with one <id>.txt for each book"


def make_source(path: Path | None) -> Source:
    """PG-19 from the Hugging Face hub, or a local folder in the raw layout."""
    if path is None:
        return HubBooks()
    root = existing_folder(path, _LAYOUT)
    if not any((root / split).is_dir() for split in SPLITS):
        own = "for texts of your own add data=documents"
        raise UserError(f"data.path: {root} holds no PG-19 corpus: expected {_LAYOUT}; {own}")
    return RawBooks(root)


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


class HubBooks(Source):
    """Rows with the columns `text` and `url` (ends in the book's number) of parquet files, which `datasets` converts in
    its own cache (11.5 GB for PG-19) and maps into memory. Downloaded files are kept.
    """

    name, origin = "pg19", HUB_NAME

    def __init__(self):
        self.identity = {"corpus": self.name, "layout": "parquet", "hub": HUB_NAME}

    @cached_property
    def _splits(self) -> "dict[str, Dataset]":
        import datasets

        try:
            return cast(Any, datasets.load_dataset(HUB_NAME))
        except Exception as error:
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            raise UserError(
                f"pg19: {HUB_NAME} could not be loaded ({reason}): try again, or set data.path to a local copy"
            ) from error

    def documents(self, split: str) -> Iterator[Document]:
        table = self._splits[split]
        found = [re.search(r"(\d+)/?$", url or "") for url in table["url"]]
        if None in found:
            row = found.index(None)
            raise UserError(f"pg19: split {split!r} of {HUB_NAME}: the url of row {row} ends in no number")
        numbers = [int(number[1]) for number in found if number]
        texts = table.select_columns(["text"])
        for number, row in sorted(zip(numbers, range(len(numbers)), strict=True)):
            yield Document(str(number), texts[row]["text"])

    def num_bytes(self, split: str) -> int | None:
        return getattr(self._splits[split].info.splits.get(split), "num_bytes", None)  # pyright: ignore[reportOptionalMemberAccess]
