"""The source code of Python's standard library: real text with long-range structure, without a download."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from landmark.experiment.data.sources import SPLITS, Document, Source, existing_folder, fingerprint
from landmark.utils.errors import UserError

# Installed packages are not the library; tests repeat themselves; build data differs from machine to machine.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
_SKIPPED_PREFIXES = ("_sysconfigdata",)


def split_of(name: str) -> str:
    """The split of a document, by a hash of its name: about 90 % train, 5 % validation, 5 % test."""
    percentile = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100
    return "train" if percentile < 90 else "validation" if percentile < 95 else "test"


class StandardLibrary(Source):
    """Documents are the `.py` files below root (None: this Python's library), by name. Files not UTF-8 are left out."""

    name = "stdlib"

    def __init__(self, root: Path | None = None):
        """Raises UserError if there is no such folder, or a split is empty."""
        root = Path(sysconfig.get_path("stdlib")) if root is None else root
        self._root = existing_folder(root, "Python source")
        self.origin = str(self._root)
        names: dict[str, list[str]] = {split: [] for split in SPLITS}
        for name in sorted(_source_files(self._root)):
            names[split_of(name)].append(name)
        for split in SPLITS:
            if not names[split]:
                raise UserError(
                    f"stdlib: no .py file of {self._root} falls into split {split!r}: "
                    "give a folder with more Python source as data.path"
                )
        self._names = names
        listing = fingerprint(self._root, (self._root / name for split in SPLITS for name in names[split]))
        self.identity = {"corpus": self.name, **listing}

    def documents(self, split: str) -> Iterator[Document]:
        for name in self._names[split]:
            try:
                yield Document(name, (self._root / name).read_bytes().decode("utf-8"))
            except UnicodeDecodeError:
                continue

    def num_bytes(self, split: str) -> int:
        return sum((self._root / name).stat().st_size for name in self._names[split])


def make_source(path: Path | None) -> StandardLibrary:
    """The standard library, or another folder of Python source."""
    return StandardLibrary(path)


def _source_files(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for file in files:
            path = Path(folder, file)
            if file.endswith(".py") and not file.startswith(_SKIPPED_PREFIXES) and path.is_file():
                yield path.relative_to(root).as_posix()
